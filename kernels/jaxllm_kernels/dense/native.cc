// y[r, n] = sum over k of x[r, k] * weight[n, k], in float32, for the few rows of a decode step.
//
// Rows of zeros at the end, which is how steps are padded, cost nothing.
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

// Rows of x and of weights whose sums are in registers at a time: as many as there are registers. Of
// float32 fewer, since they shall also stay in the nearest cache.
constexpr int kBlockRows = kIsOneRegister ? 4 : 2;
template <typename Kind>
constexpr int kBlockOutputs = kIsOneRegister ? (sizeof(typename Kind::Element) == 4 ? 4 : 6) : 2;
// Of the outputs; more of them are begun more often without their weights being near.
constexpr int64_t kTilesPerThread = 8;

template <typename Kind>
struct Product {
  const typename Kind::Element* x;
  const typename Kind::Element* weight;
  float* y;
  int64_t num_rows, num_inputs, num_outputs;
};

// Which weights of the next block of outputs to bring near: these, and every so many after them.
struct Ahead {
  int first, step;
};

// Compute a block of outputs of a block of rows, while weights of the next one come into the second
// cache. In the first they would be in the way of what is computed now.
template <int kRows, int kOutputs, typename Kind>
inline void MultiplyBlock(const Product<Kind>& p, int64_t row, int64_t output, Ahead ahead) {
  Floats sums[kRows][kOutputs] = {};
  const auto* x = p.x + row * p.num_inputs;
  const auto* weight = p.weight + output * p.num_inputs;
  for (int64_t k = 0; k < p.num_inputs; k += Kind::kStep) {
    typename Kind::Loaded xs[kRows];
    for (int r = 0; r < kRows; ++r) xs[r] = Kind::Load(x + r * p.num_inputs + k);
    for (int n = 0; n < kOutputs; ++n) {
      const auto w = Kind::Load(weight + n * p.num_inputs + k);
      for (int r = 0; r < kRows; ++r) Kind::Add(sums[r][n], xs[r], w);
    }
    for (int n = ahead.first; n < kOutputs; n += ahead.step)
      __builtin_prefetch(weight + (kOutputs + n) * p.num_inputs + k, 0, 2);
  }
  for (int r = 0; r < kRows; ++r)
    for (int n = 0; n < kOutputs; ++n)
      p.y[(row + r) * p.num_outputs + output + n] = Sum(sums[r][n]);
}

// Compute a block of outputs of all rows. The weights stay in the cache from one block of rows to
// the next, and each brings its share of those that follow: memory and arithmetic are both busy.
template <int kOutputs, typename Kind>
inline void MultiplyRows(const Product<Kind>& p, int64_t output, bool is_last) {
  const int num_blocks = (p.num_rows + kBlockRows - 1) / kBlockRows;
  for (int block = 0; block < num_blocks; ++block) {
    const int64_t row = block * kBlockRows;
    const Ahead ahead{is_last ? kOutputs : block, num_blocks};
    static_assert(kBlockRows <= 4, "what is left of the rows is one of these cases");
    switch (std::min<int64_t>(kBlockRows, p.num_rows - row)) {
      case 4: MultiplyBlock<4, kOutputs>(p, row, output, ahead); break;
      case 3: MultiplyBlock<3, kOutputs>(p, row, output, ahead); break;
      case 2: MultiplyBlock<2, kOutputs>(p, row, output, ahead); break;
      case 1: MultiplyBlock<1, kOutputs>(p, row, output, ahead); break;
    }
  }
}

template <typename Kind>
void MultiplyTile(const Product<Kind>& p, int64_t output, int64_t end) {
  constexpr int kOutputs = kBlockOutputs<Kind>;
  for (; output + kOutputs <= end; output += kOutputs)
    MultiplyRows<kOutputs>(p, output, output + 2 * kOutputs > end);
  for (; output < end; ++output) MultiplyRows<1>(p, output, true);
}

template <typename Kind>
void Multiply(const Product<Kind>& p, ffi::ThreadPool& pool) {
  constexpr int64_t kOutputs = kBlockOutputs<Kind>;
  const int64_t num_blocks = (p.num_outputs + kOutputs - 1) / kOutputs;
  const int64_t num_tiles = std::max<int64_t>(1, pool.num_threads() * kTilesPerThread);
  // Of whole blocks, each tile smaller than the one before: threads come to the end together.
  auto begin = [=, &p](int64_t tile) {
    const int64_t left = num_tiles - tile;
    const int64_t blocks_left = num_blocks * left * left / (num_tiles * num_tiles);
    return std::min((num_blocks - blocks_left) * kOutputs, p.num_outputs);
  };
  Share(pool, num_tiles, 0,
        [&](int64_t tile) { MultiplyTile(p, begin(tile), begin(tile + 1)); });
}

// How many rows there are up to the last one that is not all zeros.
template <typename Element>
int64_t CountRows(const Element* x, int64_t num_rows, int64_t num_inputs) {
  auto is_zero = [](Element value) {
    if constexpr (sizeof(Element) == 2) value &= 0x7fff;  // the sign: minus zero is one, too
    return value == 0;
  };
  for (const Element* row = x + num_rows * num_inputs; num_rows > 0; --num_rows) {
    row -= num_inputs;
    if (!std::all_of(row, row + num_inputs, is_zero)) break;
  }
  return num_rows;
}

template <ffi::DataType kType, typename Kind>
ffi::Error MultiplyBuffers(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x,
                           ffi::Buffer<kType, 2> weight, ffi::ResultBuffer<ffi::F32, 2> y) {
  using Element = typename Kind::Element;
  const auto rows = x.dimensions(), outputs = weight.dimensions();
  if (rows[1] != outputs[1] || rows[1] % Kind::kStep != 0)
    return ffi::Error::InvalidArgument("the inner sizes do not fit");
  const auto* first = reinterpret_cast<const Element*>(x.untyped_data());
  const int64_t num_rows = CountRows(first, rows[0], rows[1]);
  const Product<Kind> product{first, reinterpret_cast<const Element*>(weight.untyped_data()),
                              y->typed_data(), num_rows, rows[1], outputs[0]};
  if (num_rows > 0) Multiply(product, pool);
  std::fill(product.y + num_rows * outputs[0], product.y + rows[0] * outputs[0], 0.0f);
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

}  // namespace

#ifdef JAXLLM_FLOAT32
constexpr auto MultiplyF32 = MultiplyBuffers<ffi::F32, Float32>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_f32, MultiplyF32, Signature<ffi::F32>());
#endif
#ifdef JAXLLM_BFLOAT16
constexpr auto MultiplyBF16 = MultiplyBuffers<ffi::BF16, BFloat16>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_bf16, MultiplyBF16, Signature<ffi::BF16>());
#endif
