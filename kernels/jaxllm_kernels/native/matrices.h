// Weights of the operations: stacks of matrices [outputs, inputs] of elements, or of codes.
//
// A stack makes rows of an operand into what it multiplies, and products of them with some outputs
// of one of its matrices.

#pragma once

#include <algorithm>
#include <cstdint>

#include "native/coded_products.h"
#include "native/products.h"
#include "native/rows.h"

namespace jaxllm {

// Rows that a thread prepares at a time.
constexpr int64_t kPreparedRows = 8;

// The rows of a product: those whose numbers `index` has, or, if that is null, all from `first` on.
struct Chosen {
  int64_t first, count;
  const int32_t* index = nullptr;
};

template <typename Kind>
struct ElementMatrices {
  using Model = typename Kind::Element;
  using ProductOfRows = Product<Kind>;
  struct RowsOfX {
    const Model* x;

    bool has_work() const { return false; }
    void Prepare(int64_t) const {}
  };

  const Model* weights;
  int64_t num_outputs, num_inputs;

  RowsOfX Take(const Model* x, int64_t) const { return {x}; }

  ProductOfRows Multiply(const RowsOfX& x, Chosen rows, int64_t matrix, Range outputs,
                         float* y) const {
    return {x.x + rows.first * num_inputs,
            weights + (matrix * num_outputs + outputs.begin) * num_inputs,
            y,
            rows.count,
            num_inputs,
            outputs.end - outputs.begin,
            PieceSize<Model>(num_inputs, Kind::kStep),
            rows.index};
  }
};

template <typename Element, typename Codes>
struct CodedMatrices {
  using Model = Element;
  using ProductOfRows = CodedProduct<Model, Codes>;
  using RowsOfX = typename ProductOfRows::RowsOfX;

  const uint8_t* codes;
  const float* scales;   // [matrices, outputs, groups]
  const float* offsets;  // the same, or null
  int64_t num_outputs, num_inputs, num_groups;

  int64_t group() const { return num_inputs / num_groups; }

  // Groups are all inputs, or powers of two of at least 16. So a group is found by a shift.
  bool IsSupported() const {
    const bool has_bytes = Codes::kBytes == kChunk;
    if (num_groups < 1 || num_inputs % (num_groups * 16)) return false;
    if (num_inputs % (has_bytes ? kLeastRowPart : kChunk)) return false;
    return num_groups == 1 || (group() & (group() - 1)) == 0;
  }
  int64_t num_bytes() const { return num_outputs * num_inputs * Codes::kBytes / kChunk; }

  RowsOfX Take(const Model* x, int64_t num_rows) const {
    return RowsOfX(x, num_rows, num_inputs, std::max(PartOf(group()), kLeastRowPart), group(),
                   offsets != nullptr);
  }

  ProductOfRows Multiply(const RowsOfX& x, Chosen rows, int64_t matrix, Range outputs,
                         float* y) const {
    const int64_t first = matrix * num_outputs + outputs.begin;
    ProductOfRows product{&x,
                          codes + first * num_inputs * Codes::kBytes / kChunk,
                          scales + first * num_groups,
                          offsets ? offsets + first * num_groups : nullptr,
                          y,
                          rows.count,
                          num_inputs,
                          outputs.end - outputs.begin};
    product.piece = PieceSize<typename RowsOfX::Element>(num_inputs, kChunk);
    product.part = PartOf(group());
    product.group_shift = num_groups == 1 ? 63 : __builtin_ctzll(group());
    product.num_groups = num_groups;
    product.first_row = rows.first;
    product.rows = rows.index;
    return product;
  }
};

}  // namespace jaxllm
