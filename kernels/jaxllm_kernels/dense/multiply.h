// y[r, n] = sum over k of x[r, k] * weight[n, k], in float32, for the rows of decodes and of short
// prompts. `products.h` has the products of one thread.
//
// Padding is at the end. Rows that repeat the one before cost a copy of its result, and rows of
// zeros cost no product at all.

#pragma once

#include <algorithm>
#include <cstdint>

#include "native/ffi.h"
#include "native/matrices.h"
#include "native/padding.h"
#include "native/threads.h"

namespace jaxllm {

template <typename Matrices>
void Multiply(const Matrices& weight, const typename Matrices::Model* x, int64_t num_rows, float* y,
              ffi::ThreadPool& pool) {
  using Product = typename Matrices::ProductOfRows;
  constexpr int64_t kOutputs = Product::kBlockOutputs;
  const auto rows = weight.Take(x, num_rows);
  const Product product =
      weight.Multiply(rows, {0, num_rows}, 0, {0, weight.num_outputs}, y);
  const int64_t panel = Cut(num_rows, kPanelRows, Product::kBlockRows);
  const int64_t num_panels = (num_rows + panel - 1) / panel;
  const int64_t num_blocks = (weight.num_outputs + kOutputs - 1) / kOutputs;
  const int64_t num_tiles =
      std::max<int64_t>(1, pool.num_threads() * kTilesPerThread / num_panels);
  // Tiles have whole blocks. Each is smaller than the one before, so that threads end together.
  auto begin = [=, &weight](int64_t tile) {
    const int64_t left = num_tiles - tile;
    const int64_t blocks_left = num_blocks * left * left / (num_tiles * num_tiles);
    return std::min((num_blocks - blocks_left) * kOutputs, weight.num_outputs);
  };
  const int64_t num_parts = rows.has_work() ? (num_rows + kPreparedRows - 1) / kPreparedRows : 0;
  // Compute all panels of a tile before the next tile, so that its weights are still in a cache.
  Share(pool, {num_parts, num_tiles * num_panels}, [&](int64_t phase, int64_t unit) {
    if (phase == 0) {
      const int64_t end = std::min((unit + 1) * kPreparedRows, num_rows);
      for (int64_t row = unit * kPreparedRows; row < end; ++row) rows.Prepare(row);
      return;
    }
    const int64_t tile = unit / num_panels, row = unit % num_panels * panel;
    MultiplyPanel(product, {row, std::min(row + panel, num_rows)}, {begin(tile), begin(tile + 1)});
  });
}

// Multiply the distinct rows, and repeat the last result for those that repeat the last of them.
template <typename Matrices>
void MultiplyAll(const Matrices& weight, const typename Matrices::Model* x, int64_t num_rows,
                 float* y, ffi::ThreadPool& pool) {
  if (num_rows == 0) return;
  const int64_t num_inputs = weight.num_inputs, num_outputs = weight.num_outputs;
  const int64_t last = CountDistinct(x, num_rows, num_inputs) - 1;
  const bool is_zero = IsZero(x + last * num_inputs, num_inputs);
  const int64_t num_multiplied = is_zero ? last : last + 1;
  if (num_multiplied > 0) Multiply(weight, x, num_multiplied, y, pool);
  if (is_zero) std::fill_n(y + last * num_outputs, num_outputs, 0.0f);
  for (int64_t row = last + 1; row < num_rows; ++row)
    std::copy_n(y + last * num_outputs, num_outputs, y + row * num_outputs);
}

}  // namespace jaxllm
