// y[r, n] = sum over k of x[r, k] * weight[n, k], in float32, for the few rows of a decode step.
//
// With few rows the time is that of reading the weights, so they are read once and in order, by all
// threads, and everything else stays in registers and the nearest cache. An output is a sum over
// weights that lie one after another. How it is summed does not depend on what else is computed, so
// a row's result is the same alone and among others.

#include <algorithm>
#include <cstdint>

#include "native/threads.h"
#include "native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxllm;

constexpr int kBlockRows = 4;         // rows of x whose sums are in registers at a time
constexpr int kBlockOutputs = 4;      // rows of weights beside them
constexpr int64_t kTileOutputs = 32;  // outputs that a thread takes at a time

template <typename Kind>
struct Product {
  const typename Kind::Element* x;
  const typename Kind::Element* weight;
  float* y;
  int64_t num_rows, num_inputs, num_outputs;
};

// Compute a block of outputs of a block of rows.
template <int kRows, int kOutputs, typename Kind>
inline void MultiplyBlock(const Product<Kind>& p, int64_t row, int64_t output) {
  Floats sums[kRows][kOutputs] = {};
  const auto* x = p.x + row * p.num_inputs;
  const auto* weight = p.weight + output * p.num_inputs;
  for (int64_t k = 0; k < p.num_inputs; k += Kind::kStep) {
    typename Kind::Loaded xs[kRows];
    for (int r = 0; r < kRows; ++r) xs[r] = Kind::Load(x + r * p.num_inputs + k);
    for (int n = 0; n < kOutputs; ++n) {
      const auto* here = weight + n * p.num_inputs + k;
      const auto w = Kind::Load(here);
      // The next block, while this one is computed; the processor does not see it coming.
      if (row == 0) __builtin_prefetch(here + kOutputs * p.num_inputs);
      for (int r = 0; r < kRows; ++r) Kind::Add(sums[r][n], xs[r], w);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int n = 0; n < kOutputs; ++n)
      p.y[(row + r) * p.num_outputs + output + n] = Sum(sums[r][n]);
}

// Compute a block of outputs of all rows; the weights stay in the cache from block to block.
template <int kOutputs, typename Kind>
inline void MultiplyRows(const Product<Kind>& p, int64_t output) {
  static_assert(kBlockRows == 4, "what is left of the rows is one of the cases below");
  int64_t row = 0;
  for (; row + kBlockRows <= p.num_rows; row += kBlockRows)
    MultiplyBlock<kBlockRows, kOutputs>(p, row, output);
  switch (p.num_rows - row) {
    case 3: MultiplyBlock<3, kOutputs>(p, row, output); break;
    case 2: MultiplyBlock<2, kOutputs>(p, row, output); break;
    case 1: MultiplyBlock<1, kOutputs>(p, row, output); break;
  }
}

template <typename Kind>
void MultiplyTile(const Product<Kind>& p, int64_t tile) {
  int64_t output = tile * kTileOutputs;
  const int64_t end = std::min(output + kTileOutputs, p.num_outputs);
  for (; output + kBlockOutputs <= end; output += kBlockOutputs)
    MultiplyRows<kBlockOutputs>(p, output);
  for (; output < end; ++output) MultiplyRows<1>(p, output);
}

template <typename Kind>
void Multiply(const Product<Kind>& p, ffi::ThreadPool& pool) {
  const int64_t num_tiles = (p.num_outputs + kTileOutputs - 1) / kTileOutputs;
  Share(pool, num_tiles, 0, [&p](int64_t tile) { MultiplyTile(p, tile); });
}

template <ffi::DataType kType, typename Kind>
ffi::Error MultiplyBuffers(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x,
                           ffi::Buffer<kType, 2> weight, ffi::ResultBuffer<ffi::F32, 2> y) {
  using Element = typename Kind::Element;
  const auto rows = x.dimensions(), outputs = weight.dimensions();
  if (rows[1] != outputs[1] || rows[1] % Kind::kStep != 0)
    return ffi::Error::InvalidArgument("the inner sizes do not fit");
  const Product<Kind> product{reinterpret_cast<const Element*>(x.untyped_data()),
                              reinterpret_cast<const Element*>(weight.untyped_data()),
                              y->typed_data(), rows[0], rows[1], outputs[0]};
  Multiply(product, pool);
  return ffi::Error::Success();
}

template <ffi::DataType kType>
auto Signature() {
  using Matrix = ffi::Buffer<kType, 2>;
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<Matrix>()
      .template Arg<Matrix>()
      .template Ret<ffi::Buffer<ffi::F32, 2>>();
}

constexpr auto MultiplyF32 = MultiplyBuffers<ffi::F32, Float32>;
constexpr auto MultiplyBF16 = MultiplyBuffers<ffi::BF16, BFloat16>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_f32, MultiplyF32, Signature<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_bf16, MultiplyBF16, Signature<ffi::BF16>());
