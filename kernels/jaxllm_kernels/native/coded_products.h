// Products of rows with weights that are stored as codes, for one thread. `products.h` has the order
// in which blocks are computed.
//
// A weight is its code times a scale, plus an offset if there are any; both belong to a group of
// inputs of an output. Codes are multiplied as they are. Sums of a part of the inputs, at most a
// group and at most a chunk, are multiplied by scales in float32. An offset multiplies the sum of
// the group's inputs, which a row has once.

#pragma once

#include "native/codes.h"
#include "native/products.h"
#include "native/rows.h"

namespace jaxllm {

template <typename Model, typename Kind>
struct CodedProduct {
  using Codes = Kind;
  using Products = typename ProductsOf<Model, Codes>::Type;
  using RowsOfX = Rows<Model, Products>;
  static constexpr int kBlockRows = 4;
  static constexpr int kBlockOutputs = 4;

  const RowsOfX* x;
  const uint8_t* codes;
  const float* scales;
  const float* offsets;  // null: none
  float* y;
  int64_t num_rows, num_inputs, num_outputs;
  int64_t piece;  // of the inputs
  int64_t part;
  int group_shift;  // the number of an input's group, when it is shifted by it
  int64_t num_groups;
  int64_t first_row;
  const int32_t* rows;  // the rows of x that are multiplied; null: all from the first one on

  int64_t row(int64_t r) const { return rows ? rows[r] : first_row + r; }
  int64_t row_bytes() const { return num_inputs * Codes::kBytes / kChunk; }
};

// The parts in which products are summed: the largest of these that divides a group.
constexpr int64_t kParts[] = {128, 32, 16};

inline int64_t PartOf(int64_t group) {
  for (int64_t part : kParts)
    if (group % part == 0) return part;
  return 0;
}
// Rows have a size for each part, and for no fewer inputs than these.
constexpr int64_t kLeastRowPart = 32;

template <int kSize, typename AnyProduct>
struct WithPart : AnyProduct {
  static constexpr int kPart = kSize;
};

// The sum of a row's products with an output's codes, for `inputs`.
//
// One output after the other: then its codes are read in order, and sums stay in registers.
template <int kRows, typename P, int kPart = P::kPart>
[[gnu::always_inline]] inline void MultiplyOutput(const P& p, int64_t output, Range inputs,
                                                  const typename P::Products::Element* (&x)[kRows],
                                                  const float* (&row_scales)[kRows],
                                                  const uint8_t* prefetched,
                                                  Floats (&totals)[kRows]) {
  using Codes = typename P::Codes;
  using Products = typename P::Products;
  // The inputs whose sums are scaled together. They may be of two groups.
  constexpr int kUnit = kPart > Products::kStep ? kPart : Products::kStep;
  constexpr int kSteps = kUnit / Products::kStep;
  constexpr int kRowPart = kPart > kLeastRowPart ? kPart : kLeastRowPart;
  // Codes of 4 bits are whole chunks, whose steps have shifts that the compiler must know.
  constexpr int kUnits = Codes::kBytes == kChunk ? 1 : kChunk / kUnit;
  const uint8_t* codes = p.codes + output * p.row_bytes();
  const float* scales = p.scales + output * p.num_groups;
  for (int64_t k = inputs.begin; k < inputs.end; k += kUnits * kUnit) {
    const uint8_t* chunk = codes + k * Codes::kBytes / kChunk;
    if (prefetched)
      for (int i = 0; i < kUnits * kUnit * Codes::kBytes / kChunk; i += 64)
        __builtin_prefetch(prefetched + (chunk - codes) + i, 0, 2);
#pragma GCC unroll 8
    for (int unit = 0; unit < kUnits; ++unit) {
      typename Products::Sum sums[kRows] = {};
#pragma GCC unroll 16
      for (int i = 0; i < kSteps; ++i) {
        const int step = unit * kSteps + i;
        const auto w = Products::template Load<Codes>(chunk, step);
        for (int r = 0; r < kRows; ++r)
          Products::Add(sums[r], x[r] + k + step * Products::kStep, w);
      }
      const int64_t input = k + unit * kUnit;
      Floats scale = scales[input >> p.group_shift] - Floats{};
      if constexpr (kUnit > kPart) {
        // Lanes have neighbouring inputs, so the upper half of them is the second group.
        const float second = scales[(input + kPart) >> p.group_shift];
        for (int lane = kLanes / 2; lane < kLanes; ++lane) scale[lane] = second;
      }
      for (int r = 0; r < kRows; ++r) {
        Floats factor = scale;
        if constexpr (Products::kHasRowScales) factor *= row_scales[r][input / kRowPart];
        AddProduct(totals[r], Products::ToFloats(sums[r]), factor);
      }
    }
  }
}

// The products of an output's offsets with the sums of a row's groups, in units of codes.
template <typename P>
inline Floats MultiplyOffsets(const P& p, int64_t row, int64_t output) {
  const float* offsets = p.offsets + output * p.num_groups;
  const float* sums = p.x->sums(p.row(row));
  Floats total{};
  int64_t g = 0;
  for (; g + kLanes <= p.num_groups; g += kLanes)
    AddProduct(total, LoadVector<Floats>(offsets + g), LoadVector<Floats>(sums + g));
  Floats rest[2] = {};
  for (int i = 0; g + i < p.num_groups; ++i) rest[0][i] = offsets[g + i], rest[1][i] = sums[g + i];
  AddProduct(total, rest[0], rest[1]);
  return total * (1 / P::Codes::kUnit);
}

// Compute what `products.h` says of a block.
template <int kRows, int kOutputs, typename P, int kPart = P::kPart>
inline void MultiplyBlock(const P& p, int64_t row, int64_t output, Range inputs, Ahead ahead) {
  using Products = typename P::Products;
  const typename Products::Element* x[kRows];
  const float* row_scales[kRows] = {};
  for (int r = 0; r < kRows; ++r) {
    x[r] = p.x->elements(p.row(row + r));
    if constexpr (Products::kHasRowScales) row_scales[r] = p.x->scales(p.row(row + r));
  }
  float* y = p.y + row * p.num_outputs + output;
  for (int64_t begin = inputs.begin; begin < inputs.end; begin += p.piece) {
    const Range piece{begin, std::min(begin + p.piece, inputs.end)};
    Floats totals[kOutputs][kRows] = {};
#pragma GCC unroll 1
    for (int n = 0; n < kOutputs; ++n) {
      Floats of_output[kRows] = {};
      const bool prefetches = n >= ahead.first && (n - ahead.first) % ahead.step == 0;
      MultiplyOutput<kRows>(
          p, output + n, piece, x, row_scales,
          prefetches ? p.codes + (output + kOutputs + n) * p.row_bytes() : nullptr, of_output);
      for (int r = 0; r < kRows; ++r) {
        totals[n][r] = of_output[r];
        if (begin == 0 && p.offsets) totals[n][r] += MultiplyOffsets(p, row + r, output + n);
      }
    }
    float sums[kRows][kOutputs];
    SumAll(totals, sums);
    for (int r = 0; r < kRows; ++r)
      for (int n = 0; n < kOutputs; ++n) {
        float& sum = y[r * p.num_outputs + n];
        sum = sums[r][n] * P::Codes::kUnit + (begin > 0 ? sum : 0.0f);
      }
  }
}

// The compiler knows the part of a panel's blocks.
template <typename Model, typename Codes>
void MultiplyPanel(const CodedProduct<Model, Codes>& p, Range rows, Range outputs) {
  using P = CodedProduct<Model, Codes>;
  switch (p.part) {
    case 128: return MultiplyPanel(WithPart<128, P>{p}, rows, outputs);
    case 32: return MultiplyPanel(WithPart<32, P>{p}, rows, outputs);
    case 16: return MultiplyPanel(WithPart<16, P>{p}, rows, outputs);
  }
}

}  // namespace jaxllm
