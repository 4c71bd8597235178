// y[r, n] = sum over k of x[r, k] * weight[n, k], in float32, for the rows of decodes and of short
// prompts.
//
// Rows of zeros at the end, with which steps are padded, cost nothing.
//
// With few rows, reading the weights takes the time. So all threads read them once and in order,
// and everything else stays in registers and the L1 cache. With many rows, multiplying takes the
// time: the parts of x and the weights that are multiplied together are cut so that they stay in
// caches.
//
// An output is a sum over contiguous weights, in pieces of a fixed size. The order of the sum does
// not depend on the other rows, so a row's result is the same alone and in a batch.

#include <algorithm>
#include <cstdint>

#include "native/threads.h"
#include "native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxllm;

// The number of registers of a vector of elements.
template <typename Kind>
constexpr int kEach = sizeof(typename Kind::Loaded) / sizeof(Floats);
// Rows of x and of weights whose sums are in registers together, with the rows of x and one row of
// weights: as many as fit in the registers.
template <typename Kind>
constexpr int kBlockRows = kNumRegisters == 32 ? 4 : 4 - kEach<Kind>;
template <typename Kind>
constexpr int kBlockOutputs =
    (kNumRegisters - (kBlockRows<Kind> + 1) * kEach<Kind>) / kBlockRows<Kind>;
// The approximate size of a partial sum: a block's rows and weights of this size fit in the L1
// cache.
constexpr int64_t kPieceBytes = 2048;
// The approximate number of rows of a piece in the L2 cache.
constexpr int64_t kPanelRows = 128;
// Tiles of outputs. With more tiles, threads begin more often with weights that are not in a cache.
constexpr int64_t kTilesPerThread = 8;

template <typename Kind>
struct Product {
  const typename Kind::Element* x;
  const typename Kind::Element* weight;
  float* y;
  int64_t num_rows, num_inputs, num_outputs;
  int64_t piece;  // of the inputs
};

struct Range {
  int64_t begin, end;
};

// The size of about equally large parts: close to `about`, and a multiple of `step` except for the
// last part.
inline int64_t Cut(int64_t whole, int64_t about, int64_t step) {
  const int64_t num_parts = std::max<int64_t>(1, (whole + about / 2) / about);
  const int64_t num_steps = (whole + step - 1) / step;
  return (num_steps + num_parts - 1) / num_parts * step;
}

// The weights of the next block of outputs to prefetch: from `first` on, every `step`.
struct Ahead {
  int first, step;
};

// Compute a block of outputs of a block of rows for some of the inputs. Meanwhile, prefetch weights
// of the next block into the L2 cache; in L1 they would evict data that is needed now.
//
// Always inline: otherwise compilers keep a function, and prepare the values common to all rows of
// an output again for each block of rows. That costs a tenth of the time if sums are short.
template <int kRows, int kOutputs, typename Kind>
[[gnu::always_inline]] inline void MultiplyBlock(const Product<Kind>& p, int64_t row,
                                                 int64_t output, Range inputs, Ahead ahead) {
  const auto* x = p.x + row * p.num_inputs;
  const auto* weight = p.weight + output * p.num_inputs;
  float* y = p.y + row * p.num_outputs + output;
  for (int64_t begin = inputs.begin; begin < inputs.end; begin += p.piece) {
    Floats sums[kOutputs][kRows] = {};
    const int64_t end = std::min(begin + p.piece, inputs.end);
    for (int64_t k = begin; k < end; k += Kind::kStep) {
      typename Kind::Loaded xs[kRows];
      for (int r = 0; r < kRows; ++r) xs[r] = Kind::Load(x + r * p.num_inputs + k);
      for (int n = 0; n < kOutputs; ++n) {
        const auto w = Kind::Load(weight + n * p.num_inputs + k);
        for (int r = 0; r < kRows; ++r) Kind::Add(sums[n][r], xs[r], w);
      }
      for (int n = ahead.first; n < kOutputs; n += ahead.step)
        __builtin_prefetch(weight + (kOutputs + n) * p.num_inputs + k, 0, 2);
    }
    float totals[kRows][kOutputs];
    SumAll(sums, totals);
    for (int r = 0; r < kRows; ++r)
      for (int n = 0; n < kOutputs; ++n)
        y[r * p.num_outputs + n] = totals[r][n] + (begin > 0 ? y[r * p.num_outputs + n] : 0.0f);
  }
}

// Compute a block of outputs of some rows. The weights stay in the cache from one block of rows to
// the next. Each block prefetches a share of the next weights, so memory and arithmetic are both
// busy.
template <int kOutputs, typename Kind>
inline void MultiplyRows(const Product<Kind>& p, Range rows, int64_t output, Range inputs,
                         bool is_last) {
  constexpr int kRows = kBlockRows<Kind>;
  const int num_blocks = (rows.end - rows.begin + kRows - 1) / kRows;
  int64_t row = rows.begin;
  Ahead ahead{is_last ? kOutputs : 0, num_blocks};
  for (; row + kRows <= rows.end; row += kRows, ++ahead.first)
    MultiplyBlock<kRows, kOutputs>(p, row, output, inputs, ahead);
  static_assert(kRows <= 4, "what is left of the rows is one of these cases");
  switch (rows.end - row) {
    case 3: MultiplyBlock<3, kOutputs>(p, row, output, inputs, ahead); break;
    case 2: MultiplyBlock<2, kOutputs>(p, row, output, inputs, ahead); break;
    case 1: MultiplyBlock<1, kOutputs>(p, row, output, inputs, ahead); break;
  }
}

// Compute some outputs of some rows. If all rows stay in the L2 cache, weights are read in order.
// Otherwise a piece of an output's weights is read, and then the same piece of the next output's.
template <typename Kind>
void MultiplyPanel(const Product<Kind>& p, Range rows, Range outputs) {
  constexpr int kOutputs = kBlockOutputs<Kind>;
  const bool stays = (rows.end - rows.begin) * p.num_inputs <= kPanelRows * p.piece;
  const int64_t step = stays ? p.num_inputs : p.piece;
  for (int64_t k = 0; k < p.num_inputs; k += step) {
    const Range inputs{k, std::min(k + step, p.num_inputs)};
    int64_t output = outputs.begin;
    for (; output + kOutputs <= outputs.end; output += kOutputs)
      MultiplyRows<kOutputs>(p, rows, output, inputs, output + 2 * kOutputs > outputs.end);
    for (; output < outputs.end; ++output) MultiplyRows<1>(p, rows, output, inputs, true);
  }
}

template <typename Kind>
void Multiply(const Product<Kind>& p, ffi::ThreadPool& pool) {
  constexpr int64_t kOutputs = kBlockOutputs<Kind>;
  const int64_t panel = Cut(p.num_rows, kPanelRows, kBlockRows<Kind>);
  const int64_t num_panels = (p.num_rows + panel - 1) / panel;
  const int64_t num_blocks = (p.num_outputs + kOutputs - 1) / kOutputs;
  const int64_t num_tiles =
      std::max<int64_t>(1, pool.num_threads() * kTilesPerThread / num_panels);
  // Tiles have whole blocks. Each is smaller than the one before, so that threads end together.
  auto begin = [=, &p](int64_t tile) {
    const int64_t left = num_tiles - tile;
    const int64_t blocks_left = num_blocks * left * left / (num_tiles * num_tiles);
    return std::min((num_blocks - blocks_left) * kOutputs, p.num_outputs);
  };
  // Compute all panels of a tile before the next tile, so that its weights are still in a cache.
  Share(pool, num_tiles * num_panels, 0, [&](int64_t unit) {
    const int64_t tile = unit / num_panels, row = unit % num_panels * panel;
    MultiplyPanel(p, {row, std::min(row + panel, p.num_rows)}, {begin(tile), begin(tile + 1)});
  });
}

// The number of rows up to the last one that is not all zeros.
template <typename Element>
int64_t CountRows(const Element* x, int64_t num_rows, int64_t num_inputs) {
  auto is_zero = [](Element value) {
    if constexpr (sizeof(Element) == 2) value &= 0x7fff;  // ignore the sign of minus zero
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
                              y->typed_data(), num_rows, rows[1], outputs[0],
                              Cut(rows[1], kPieceBytes / sizeof(Element), Kind::kStep)};
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
