// The experts of a layer: y[t] = sum over t's experts of factor * down(activation(gate(x), up(x))).
//
// Choices are sorted by expert, so that an expert's weights are read once for all of its rows. An
// expert without rows costs nothing. First, threads take outputs of gate and up of an expert, and
// write what the activation makes of them. Then they take outputs of the down projections, for all
// experts in the order of their numbers, and add them to the sums of tokens. So there is one order
// of a token's sum, and no two threads write to the same place.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "native/ffi.h"
#include "native/matrices.h"
#include "native/threads.h"

namespace jaxllm {

// Outputs of both a whole number of blocks and of vectors: the unit in which outputs are cut.
template <typename Matrices>
constexpr int64_t kGrain = std::lcm(Matrices::ProductOfRows::kBlockOutputs, kLanes);
// Floats of a thread's results before the activation, or before they are added to sums. They stay
// in the L2 cache.
constexpr int64_t kScratch = 16 * 1024;
// Reading an expert's weights takes as long as multiplying about so many rows.
constexpr int64_t kReadingRows = 16;

// An expert that has rows, and the range of its choices.
struct Expert {
  int64_t number, begin, end;

  int64_t num_rows() const { return end - begin; }
};

// Outputs of the gate and up projections of an expert.
struct Tile {
  Expert expert;
  Range outputs;
};

// `Kind` is the type of elements, and the matrices have elements or codes.
template <typename Kind, typename Matrices>
struct Layer {
  using Element = typename Kind::Element;
  using RowsOfX = typename Matrices::RowsOfX;
  const Element* x;
  Matrices gate_up, down;                   // `num_halves` for each expert, and one
  const Element *gate_up_bias, *down_bias;  // null: none
  const int32_t* chosen;
  const float* factors;
  float* y;
  Element* inner;  // [choices, size], in the order of `tokens`
  int64_t num_tokens, num_choices, num_experts, num_halves, size, hidden_size;
  float slope, cubic, offset, limit;

  // The choices in the order of their experts.
  std::vector<int32_t> tokens;
  std::vector<float> factors_in_order;
  std::vector<Expert> experts;

  void Sort();
  std::vector<Tile> Tiles(int64_t num_threads) const;
  void Activate(const RowsOfX& rows_of_x, const Tile& tile) const;
  void AddOutputs(const RowsOfX& rows_of_inner, Range outputs) const;
};

template <typename Kind, typename Matrices>
void Layer<Kind, Matrices>::Sort() {
  std::vector<int64_t> places(num_experts + 1);
  const int64_t all = num_tokens * num_choices;
  auto is_here = [&](int64_t i) { return chosen[i] >= 0 && chosen[i] < num_experts; };
  for (int64_t i = 0; i < all; ++i)
    if (is_here(i)) ++places[chosen[i] + 1];
  for (int64_t e = 0; e < num_experts; ++e) {
    places[e + 1] += places[e];
    if (places[e] < places[e + 1]) experts.push_back({e, places[e], places[e + 1]});
  }
  tokens.resize(places[num_experts]);
  factors_in_order.resize(places[num_experts]);
  for (int64_t i = 0; i < all; ++i) {
    if (!is_here(i)) continue;
    const int64_t place = places[chosen[i]]++;
    tokens[place] = i / num_choices;
    factors_in_order[place] = factors[i];
  }
}

// Cut the gate and up projections so that tiles take about the same time.
template <typename Kind, typename Matrices>
std::vector<Tile> Layer<Kind, Matrices>::Tiles(int64_t num_threads) const {
  auto cost = [](const Expert& expert) { return expert.num_rows() + kReadingRows; };
  int64_t total = 0;
  for (const Expert& expert : experts) total += cost(expert);
  const int64_t about = num_threads * kTilesPerThread;
  std::vector<Tile> tiles;
  for (const Expert& expert : experts) {
    const int64_t num_tiles = std::max<int64_t>(1, about * cost(expert) / total);
    const int64_t step = Cut(size, (size + num_tiles - 1) / num_tiles, kGrain<Matrices>);
    for (int64_t begin = 0; begin < size; begin += step)
      tiles.push_back({expert, {begin, std::min(begin + step, size)}});
  }
  return tiles;
}

// Call work(rows, outputs) for parts of both whose products fit in the scratch memory.
template <typename Matrices, typename Work>
void ForEachPart(Range rows, Range outputs, int64_t scratch, const Work& work) {
  const int64_t num_rows = rows.end - rows.begin;
  const int64_t panel =
      std::min(Cut(num_rows, kPanelRows, Matrices::ProductOfRows::kBlockRows), num_rows);
  const int64_t step = std::max<int64_t>(1, scratch / panel / kGrain<Matrices>) * kGrain<Matrices>;
  for (int64_t row = rows.begin; row < rows.end; row += panel)
    for (int64_t output = outputs.begin; output < outputs.end; output += step)
      work(Range{row, std::min(row + panel, rows.end)},
           Range{output, std::min(output + step, outputs.end)});
}

template <typename Kind, typename Matrices>
void Layer<Kind, Matrices>::Activate(const RowsOfX& rows_of_x, const Tile& tile) const {
  thread_local std::vector<float> scratch;
  const Element* bias =
      gate_up_bias ? gate_up_bias + tile.expert.number * num_halves * size : nullptr;
  const Range all{tile.expert.begin, tile.expert.end};
  ForEachPart<Matrices>(all, tile.outputs, kScratch / 2, [&](Range rows, Range outputs) {
    const int64_t num_rows = rows.end - rows.begin, num_outputs = outputs.end - outputs.begin;
    scratch.resize(std::max<size_t>(scratch.size(), 2 * num_rows * num_outputs));
    float* results[2] = {scratch.data(), scratch.data() + num_rows * num_outputs};
    for (int64_t half = 0; half < num_halves; ++half) {
      const auto product =
          gate_up.Multiply(rows_of_x, {0, num_rows, tokens.data() + rows.begin},
                           num_halves * tile.expert.number + half, outputs, results[half]);
      MultiplyPanel(product, {0, num_rows}, {0, num_outputs});
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      Element* out = inner + (rows.begin + r) * size + outputs.begin;
      for (int64_t n = 0; num_halves == 1 && n < num_outputs; n += kLanes) {
        Floats up = LoadVector<Floats>(results[0] + r * num_outputs + n);
        if (bias) up += WidenVector(bias + outputs.begin + n);
        up = up < 0.0f ? 0.0f - Floats{} : up;
        Kind::Store(up * up, out + n);
      }
      for (int64_t n = 0; num_halves == 2 && n < num_outputs; n += kLanes) {
        Floats gate = LoadVector<Floats>(results[0] + r * num_outputs + n);
        Floats up = LoadVector<Floats>(results[1] + r * num_outputs + n);
        if (bias) {
          gate += WidenVector(bias + outputs.begin + n);
          up += WidenVector(bias + size + outputs.begin + n);
        }
        gate = gate > limit ? limit - Floats{} : gate;
        up = up > limit ? limit - Floats{} : up;
        up = up < -limit ? -limit - Floats{} : up;
        const Floats scaled = slope * (gate + cubic * gate * gate * gate);
        const Floats e = Exp(scaled > 0.0f ? -scaled : scaled);  // `Exp` is for numbers up to zero
        const Floats sigmoid = (scaled > 0.0f ? 1.0f - Floats{} : e) / (1.0f + e);
        Kind::Store((up + offset) * gate * sigmoid, out + n);
      }
    }
  });
}

template <typename Kind, typename Matrices>
void Layer<Kind, Matrices>::AddOutputs(const RowsOfX& rows_of_inner, Range outputs) const {
  thread_local std::vector<float> scratch;
  for (int64_t t = 0; t < num_tokens; ++t)
    std::fill(y + t * hidden_size + outputs.begin, y + t * hidden_size + outputs.end, 0.0f);
  for (const Expert& expert : experts) {
    const Element* bias = down_bias ? down_bias + expert.number * hidden_size : nullptr;
    const Range all{expert.begin, expert.end};
    ForEachPart<Matrices>(all, outputs, kScratch, [&](Range rows, Range outputs) {
      const int64_t num_rows = rows.end - rows.begin, num_outputs = outputs.end - outputs.begin;
      scratch.resize(std::max<size_t>(scratch.size(), num_rows * num_outputs));
      const auto product = down.Multiply(rows_of_inner, {rows.begin, num_rows}, expert.number,
                                         outputs, scratch.data());
      MultiplyPanel(product, {0, num_rows}, {0, num_outputs});
      for (int64_t r = 0; r < num_rows; ++r) {
        float* sums = y + tokens[rows.begin + r] * hidden_size + outputs.begin;
        const float factor = factors_in_order[rows.begin + r];
        for (int64_t n = 0; n < num_outputs; n += kLanes) {
          Floats result = LoadVector<Floats>(scratch.data() + r * num_outputs + n);
          if (bias) result += WidenVector(bias + outputs.begin + n);
          const Floats sum = LoadVector<Floats>(sums + n) + factor * result;
          std::memcpy(sums + n, &sum, sizeof(sum));
        }
      }
    });
  }
}

// What an expert with a gate computes between its matrices; see `ExpertsConfig`.
struct Activation {
  float slope, cubic, offset, limit;
};

// Operands and results in the order of the functions' arguments; the matrices are apart.
template <ffi::DataType kType>
struct Operands {
  ffi::Buffer<kType, 2> x;
  ffi::Buffer<ffi::S32, 2> chosen;
  ffi::Buffer<ffi::F32, 2> factors;
  ffi::Buffer<kType, 3> gate_up_bias;
  ffi::Buffer<kType, 2> down_bias;
  ffi::ResultBuffer<ffi::F32, 2> y;
  ffi::ResultBuffer<kType, 2> inner;
};

// Compute a layer. The sizes fit. There are gate and up, or up alone, where `num_halves` is 1.
template <typename Kind, ffi::DataType kType, typename Matrices>
void RunLayer(ffi::ThreadPool& pool, Operands<kType> operands, int64_t num_experts,
              int64_t num_halves, const Matrices& gate_up, const Matrices& down,
              Activation activation) {
  using Element = typename Kind::Element;
  auto elements = [](const auto& buffer) -> const Element* {
    return buffer.element_count() ? static_cast<const Element*>(buffer.untyped_data()) : nullptr;
  };
  const int64_t hidden_size = down.num_outputs, size = down.num_inputs;
  const float limit = activation.limit;
  Layer<Kind, Matrices> layer{elements(operands.x),
                              gate_up,
                              down,
                              elements(operands.gate_up_bias),
                              elements(operands.down_bias),
                              operands.chosen.typed_data(),
                              operands.factors.typed_data(),
                              operands.y->typed_data(),
                              static_cast<Element*>(operands.inner->untyped_data()),
                              operands.x.dimensions()[0],
                              operands.chosen.dimensions()[1],
                              num_experts,
                              num_halves,
                              size,
                              hidden_size,
                              activation.slope,
                              activation.cubic,
                              activation.offset,
                              limit > 0 ? limit : std::numeric_limits<float>::infinity()};
  layer.Sort();
  const int64_t num_rows = layer.num_tokens, num_inner = layer.tokens.size();
  const auto rows_of_x = gate_up.Take(layer.x, num_rows);
  const auto rows_of_inner = down.Take(layer.inner, num_inner);
  auto num_parts = [](const auto& rows, int64_t num) {
    return rows.has_work() ? (num + kPreparedRows - 1) / kPreparedRows : 0;
  };
  auto prepare = [](const auto& rows, int64_t part, int64_t num) {
    const int64_t begin = part * kPreparedRows, end = std::min(begin + kPreparedRows, num);
    for (int64_t row = begin; row < end; ++row) rows.Prepare(row);
  };
  const int64_t num_threads = pool.num_threads();
  const auto tiles = layer.Tiles(num_threads);
  const int64_t about = std::max<int64_t>(1, hidden_size / (num_threads * kTilesPerThread));
  const int64_t step = Cut(hidden_size, about, kGrain<Matrices>);
  const int64_t num_tiles = tiles.size(), num_steps = (hidden_size + step - 1) / step;
  Share(pool,
        {num_parts(rows_of_x, num_rows), num_tiles, num_parts(rows_of_inner, num_inner), num_steps},
        [&](int64_t phase, int64_t unit) {
          switch (phase) {
            case 0: return prepare(rows_of_x, unit, num_rows);
            case 1: return layer.Activate(rows_of_x, tiles[unit]);
            case 2: return prepare(rows_of_inner, unit, num_inner);
          }
          const int64_t begin = unit * step;
          layer.AddOutputs(rows_of_inner, {begin, std::min(begin + step, hidden_size)});
        });
}

}  // namespace jaxllm
