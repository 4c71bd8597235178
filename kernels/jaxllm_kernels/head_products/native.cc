// Products of each head's rows with a matrix of that head: y[t, n] = x[t, n] W[n], or its transpose.
//
// Threads take heads, and parts of the rows if there are many. An output is a sum over its inputs in
// an order that depends on the sizes of the matrix alone, so a row has the same bits alone and among
// others. Rows of zeros at the end, with which steps are padded, cost nothing.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dense/multiply.h"
#include "native/ffi.h"
#include "native/matrices.h"
#include "native/padding.h"
#include "native/rows.h"
#include "native/threads.h"

namespace {

using namespace jaxllm;

// x [rows, heads, inputs], y [rows, heads, outputs].
template <typename Element>
struct Heads {
  const Element* x;
  const Element* weights;
  Element* y;
  int64_t num_rows, num_heads, num_inputs, num_outputs;

  const Element* row(int64_t t, int64_t n) const { return x + (t * num_heads + n) * num_inputs; }
  Element* output(int64_t t, int64_t n) const { return y + (t * num_heads + n) * num_outputs; }
  const Element* weight(int64_t n) const { return weights + n * num_inputs * num_outputs; }
};

template <typename Element>
constexpr int kLineElements = 64 / sizeof(Element);

// Rows of x in float32, an input of each beside those of the others.
template <typename Element, int kRows>
void WidenRows(const Heads<Element>& heads, int64_t head, int64_t row, float* wide) {
  for (int r = 0; r < kRows; ++r) {
    const Element* x = heads.row(row + r, head);
    for (int64_t k = 0; k < heads.num_inputs; ++k) wide[k * kRows + r] = Widen(x[k]);
  }
}

// Some outputs of some rows. Each row of the matrix is multiplied by an input of each row of x; the
// sums stay in registers. Meanwhile the weights of the next outputs come.
template <typename Kind, int kRows, int kVectors>
[[gnu::always_inline]] inline void TimesBlock(const Heads<typename Kind::Element>& heads,
                                              const float* x, int64_t head, int64_t row,
                                              int64_t output) {
  using Element = typename Kind::Element;
  const Element* weight = heads.weight(head) + output;
  Floats sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < heads.num_inputs; ++k, weight += heads.num_outputs) {
    for (int i = 0; i < kVectors * kLanes; i += kLineElements<Element>)
      __builtin_prefetch(weight + kVectors * kLanes + i);
    Floats w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = WidenVector(weight + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Floats input = x[k * kRows + r] - Floats{};
      for (int v = 0; v < kVectors; ++v) AddProduct(sums[r][v], input, w[v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      Kind::Store(sums[r][v], heads.output(row + r, head) + output + v * kLanes);
}

template <typename Kind, int kRows>
void TimesRows(const Heads<typename Kind::Element>& heads, int64_t head, int64_t row,
               float* wide) {
  // As many sums as registers take, beside a vector of weights for each of a row's.
  constexpr int kMost = (kNumRegisters - 1) / (kRows + 1);
  constexpr int kVectors = kMost >= 8 ? 8 : kMost >= 4 ? 4 : 2;
  WidenRows<typename Kind::Element, kRows>(heads, head, row, wide);
  int64_t output = 0;
  for (; output + kVectors * kLanes <= heads.num_outputs; output += kVectors * kLanes)
    TimesBlock<Kind, kRows, kVectors>(heads, wide, head, row, output);
  for (; output < heads.num_outputs; output += kLanes)
    TimesBlock<Kind, kRows, 1>(heads, wide, head, row, output);
}

template <typename Kind>
void TimesPanel(const Heads<typename Kind::Element>& heads, int64_t head, Range rows) {
  constexpr int kMany = 6;
  std::vector<float> wide(kMany * heads.num_inputs);
  int64_t row = rows.begin;
  for (; row + kMany <= rows.end; row += kMany) TimesRows<Kind, kMany>(heads, head, row, &wide[0]);
  for (; row + 2 <= rows.end; row += 2) TimesRows<Kind, 2>(heads, head, row, &wide[0]);
  if (row < rows.end) TimesRows<Kind, 1>(heads, head, row, &wide[0]);
}

template <typename Kind>
void StoreRow(const float* from, int64_t size, typename Kind::Element* to) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) Kind::Store(LoadVector<Floats>(from + i), to + i);
  if (i == size) return;
  float rest[kLanes] = {};
  typename Kind::Element rounded[kLanes];
  std::copy(from + i, from + size, rest);
  Kind::Store(LoadVector<Floats>(rest), rounded);
  std::copy(rounded, rounded + (size - i), to + i);
}

template <typename Kind>
void TransposedPanel(const Heads<typename Kind::Element>& heads, int64_t head, Range rows) {
  const int64_t num_rows = rows.end - rows.begin, num_outputs = heads.num_outputs;
  std::vector<int32_t> index(num_rows);
  for (int64_t i = 0; i < num_rows; ++i) index[i] = i * heads.num_heads;
  std::vector<float> sums(num_rows * num_outputs);
  const ElementMatrices<Kind> matrices{heads.weights, num_outputs, heads.num_inputs};
  MultiplyPanel(matrices.Multiply({heads.row(rows.begin, head)}, {0, num_rows, index.data()}, head,
                                  {0, num_outputs}, sums.data()),
                {0, num_rows}, {0, num_outputs});
  for (int64_t i = 0; i < num_rows; ++i)
    StoreRow<Kind>(&sums[i * num_outputs], num_outputs, heads.output(rows.begin + i, head));
}

template <bool kTransposed, ffi::DataType kType, typename Kind>
ffi::Error MultiplyHeads(ffi::ThreadPool pool, ffi::Buffer<kType, 3> x,
                         ffi::Buffer<kType, 3> weights, ffi::ResultBuffer<kType, 3> y) {
  using Element = typename Kind::Element;
  const auto rows = x.dimensions(), matrices = weights.dimensions(), out = y->dimensions();
  const int64_t num_inputs = matrices[kTransposed ? 2 : 1];
  const int64_t num_outputs = matrices[kTransposed ? 1 : 2];
  if (rows[1] != matrices[0] || rows[2] != num_inputs || out[0] != rows[0] || out[1] != rows[1] ||
      out[2] != num_outputs)
    return ffi::Error::InvalidArgument("the sizes do not fit");
  if (kTransposed ? num_inputs % Kind::kStep : num_outputs % kLanes)
    return ffi::Error::InvalidArgument("the matrices have no whole vectors");
  const int64_t row_size = rows[1] * num_inputs;
  const auto* from = reinterpret_cast<const Element*>(x.untyped_data());
  const Heads<Element> heads{from,
                             reinterpret_cast<const Element*>(weights.untyped_data()),
                             reinterpret_cast<Element*>(y->untyped_data()),
                             CountNonzero(from, rows[0], row_size),
                             rows[1],
                             num_inputs,
                             num_outputs};
  const int64_t panel = std::max<int64_t>(1, Cut(heads.num_rows, kPanelRows, 4));
  const int64_t num_panels = (heads.num_rows + panel - 1) / panel;
  Share(pool, {heads.num_heads * num_panels}, [&](int64_t, int64_t unit) {
    const int64_t head = unit / num_panels, begin = unit % num_panels * panel;
    const Range some{begin, std::min(begin + panel, heads.num_rows)};
    if constexpr (kTransposed) TransposedPanel<Kind>(heads, head, some);
    else TimesPanel<Kind>(heads, head, some);
  });
  std::fill(heads.output(heads.num_rows, 0), heads.output(rows[0], 0), Element{});
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_heads_times_f32, (MultiplyHeads<false, ffi::F32, Float32>))
JAXLLM_FUNCTION(jaxllm_heads_times_transposed_f32, (MultiplyHeads<true, ffi::F32, Float32>))
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_heads_times_bf16, (MultiplyHeads<false, ffi::BF16, BFloat16>))
JAXLLM_FUNCTION(jaxllm_heads_times_transposed_bf16, (MultiplyHeads<true, ffi::BF16, BFloat16>))
#endif
