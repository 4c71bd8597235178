// Products of rows with the rows of a weight matrix, for one thread: the blocks that stay in
// registers, and the order in which blocks are computed.
//
// With few rows, reading the weights takes the time. So they are read once and in order, and
// everything else stays in registers and the L1 cache. With many rows, multiplying takes the time:
// the parts of x and the weights that are multiplied together are cut so that they stay in caches.
//
// An output is a sum over contiguous weights, in pieces of a fixed size. The order of the sum does
// not depend on the other rows, so a row's result is the same alone and in a batch.

#pragma once

#include <algorithm>
#include <cstdint>

#include "native/vectors.h"

namespace jaxllm {

// The approximate size of a partial sum: a block's rows and weights of this size fit in the L1
// cache.
constexpr int64_t kPieceBytes = 2048;
// The approximate number of rows of a piece in the L2 cache.
constexpr int64_t kPanelRows = 128;
// Tiles of outputs. With more tiles, threads begin more often with weights that are not in a cache.
constexpr int64_t kTilesPerThread = 8;

// y[r, n] = sum over k of x[row r, k] * weight[n, k], in float32. Every kind of product has these
// sizes, and `MultiplyBlock`.
template <typename Kind>
struct Product {
  // The number of registers of a vector of elements.
  static constexpr int kEach = sizeof(typename Kind::Loaded) / sizeof(Floats);
  // Rows of x and of weights whose sums are in registers together, with the rows of x, one row of
  // weights, and what splits pairs: as many as fit in the registers. With one more, each step would
  // wait for a sum to come back from memory.
  static constexpr int kBlockRows = kNumRegisters == 32 ? 4 : 4 - kEach;
  static constexpr int kBlockOutputs =
      (kNumRegisters - (kBlockRows + 1) * kEach - (kEach - 1)) / kBlockRows;

  const typename Kind::Element* x;
  const typename Kind::Element* weight;
  float* y;
  int64_t num_rows, num_inputs, num_outputs;
  int64_t piece;                  // of the inputs
  const int32_t* rows = nullptr;  // the rows of x that are multiplied; null: all, in order

  const typename Kind::Element* row(int64_t r) const {
    return x + (rows ? rows[r] : r) * num_inputs;
  }
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
  const typename Kind::Element* x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = p.row(row + r);
  const auto* weight = p.weight + output * p.num_inputs;
  float* y = p.y + row * p.num_outputs + output;
  for (int64_t begin = inputs.begin; begin < inputs.end; begin += p.piece) {
    Floats sums[kOutputs][kRows] = {};
    const int64_t end = std::min(begin + p.piece, inputs.end);
    for (int64_t k = begin; k < end; k += Kind::kStep) {
      typename Kind::Loaded xs[kRows];
      for (int r = 0; r < kRows; ++r) xs[r] = Kind::Load(x[r] + k);
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
template <int kOutputs, typename AnyProduct>
inline void MultiplyRows(const AnyProduct& p, Range rows, int64_t output, Range inputs,
                         bool is_last) {
  constexpr int kRows = AnyProduct::kBlockRows;
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
template <typename AnyProduct>
void MultiplyPanel(const AnyProduct& p, Range rows, Range outputs) {
  constexpr int kOutputs = AnyProduct::kBlockOutputs;
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

// The number of inputs that are summed over lanes at a time.
template <typename Element>
int64_t PieceSize(int64_t num_inputs, int64_t step) {
  return Cut(num_inputs, kPieceBytes / sizeof(Element), step);
}

}  // namespace jaxllm
