// The experts of a layer: y[t] = sum over t's experts of factor * down(activation(gate(x), up(x))).
//
// Choices are sorted by expert, so that an expert's weights are read once for all of its rows. An
// expert without rows costs nothing. First, threads take outputs of gate and up of an expert, and
// write what the activation makes of them. Then they take outputs of the down projections, for all
// experts in the order of their numbers, and add them to the sums of tokens. So there is one order
// of a token's sum, and no two threads write to the same place.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "native/products.h"
#include "native/threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxllm;

// Outputs of both a whole number of blocks and of vectors: the unit in which outputs are cut.
template <typename Kind>
constexpr int64_t kGrain = std::lcm(kBlockOutputs<Kind>, kLanes);
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

inline float Widen(float value) { return value; }
inline float Widen(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

template <typename Element>
inline Floats WidenVector(const Element* p) {
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = Widen(p[i]);
  return v;
}

template <typename Kind>
struct Layer {
  using Element = typename Kind::Element;
  const Element *x, *gate_up, *down;
  const Element *gate_up_bias, *down_bias;  // null: none
  const int32_t* chosen;
  const float* factors;
  float* y;
  Element* inner;  // [choices, size], in the order of `tokens`
  int64_t num_tokens, num_choices, num_experts, size, hidden_size;
  float slope, offset, limit;

  // The choices in the order of their experts.
  std::vector<int32_t> tokens;
  std::vector<float> factors_in_order;
  std::vector<Expert> experts;

  void Sort();
  std::vector<Tile> Tiles(int64_t num_threads) const;
  void Activate(const Tile& tile) const;
  void AddOutputs(Range outputs) const;
};

template <typename Kind>
void Layer<Kind>::Sort() {
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
template <typename Kind>
std::vector<Tile> Layer<Kind>::Tiles(int64_t num_threads) const {
  auto cost = [](const Expert& expert) { return expert.num_rows() + kReadingRows; };
  int64_t total = 0;
  for (const Expert& expert : experts) total += cost(expert);
  const int64_t about = num_threads * kTilesPerThread;
  std::vector<Tile> tiles;
  for (const Expert& expert : experts) {
    const int64_t num_tiles = std::max<int64_t>(1, about * cost(expert) / total);
    const int64_t step = Cut(size, (size + num_tiles - 1) / num_tiles, kGrain<Kind>);
    for (int64_t begin = 0; begin < size; begin += step)
      tiles.push_back({expert, {begin, std::min(begin + step, size)}});
  }
  return tiles;
}

// Call work(rows, outputs) for parts of both whose products fit in the scratch memory.
template <typename Kind, typename Work>
void ForEachPart(Range rows, Range outputs, int64_t scratch, const Work& work) {
  const int64_t num_rows = rows.end - rows.begin;
  const int64_t panel = std::min(Cut(num_rows, kPanelRows, kBlockRows<Kind>), num_rows);
  const int64_t step = std::max<int64_t>(1, scratch / panel / kGrain<Kind>) * kGrain<Kind>;
  for (int64_t row = rows.begin; row < rows.end; row += panel)
    for (int64_t output = outputs.begin; output < outputs.end; output += step)
      work(Range{row, std::min(row + panel, rows.end)},
           Range{output, std::min(output + step, outputs.end)});
}

template <typename Kind>
void Layer<Kind>::Activate(const Tile& tile) const {
  thread_local std::vector<float> scratch;
  const Element* weight = gate_up + tile.expert.number * 2 * size * hidden_size;
  const Element* bias = gate_up_bias ? gate_up_bias + tile.expert.number * 2 * size : nullptr;
  const Range all{tile.expert.begin, tile.expert.end};
  ForEachPart<Kind>(all, tile.outputs, kScratch / 2, [&](Range rows, Range outputs) {
    const int64_t num_rows = rows.end - rows.begin, num_outputs = outputs.end - outputs.begin;
    scratch.resize(std::max<size_t>(scratch.size(), 2 * num_rows * num_outputs));
    float* results[2] = {scratch.data(), scratch.data() + num_rows * num_outputs};
    for (int half = 0; half < 2; ++half) {
      const Product<Kind> product{x,
                                  weight + (half * size + outputs.begin) * hidden_size,
                                  results[half],
                                  num_rows,
                                  hidden_size,
                                  num_outputs,
                                  PieceSize<Kind>(hidden_size),
                                  tokens.data() + rows.begin};
      MultiplyPanel(product, {0, num_rows}, {0, num_outputs});
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      Element* out = inner + (rows.begin + r) * size + outputs.begin;
      for (int64_t n = 0; n < num_outputs; n += kLanes) {
        Floats gate = LoadVector<Floats>(results[0] + r * num_outputs + n);
        Floats up = LoadVector<Floats>(results[1] + r * num_outputs + n);
        if (bias) {
          gate += WidenVector(bias + outputs.begin + n);
          up += WidenVector(bias + size + outputs.begin + n);
        }
        gate = gate > limit ? limit - Floats{} : gate;
        up = up > limit ? limit - Floats{} : up;
        up = up < -limit ? -limit - Floats{} : up;
        const Floats scaled = slope * gate;
        const Floats e = Exp(scaled > 0.0f ? -scaled : scaled);  // `Exp` is for numbers up to zero
        const Floats sigmoid = (scaled > 0.0f ? 1.0f - Floats{} : e) / (1.0f + e);
        Kind::Store((up + offset) * gate * sigmoid, out + n);
      }
    }
  });
}

template <typename Kind>
void Layer<Kind>::AddOutputs(Range outputs) const {
  thread_local std::vector<float> scratch;
  for (int64_t t = 0; t < num_tokens; ++t)
    std::fill(y + t * hidden_size + outputs.begin, y + t * hidden_size + outputs.end, 0.0f);
  for (const Expert& expert : experts) {
    const Element* bias = down_bias ? down_bias + expert.number * hidden_size : nullptr;
    const Range all{expert.begin, expert.end};
    ForEachPart<Kind>(all, outputs, kScratch, [&](Range rows, Range outputs) {
      const int64_t num_rows = rows.end - rows.begin, num_outputs = outputs.end - outputs.begin;
      scratch.resize(std::max<size_t>(scratch.size(), num_rows * num_outputs));
      const Product<Kind> product{inner + rows.begin * size,
                                  down + (expert.number * hidden_size + outputs.begin) * size,
                                  scratch.data(),
                                  num_rows,
                                  size,
                                  num_outputs,
                                  PieceSize<Kind>(size)};
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

template <ffi::DataType kType, typename Kind>
ffi::Error RunExperts(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x,
                      ffi::Buffer<ffi::S32, 2> chosen, ffi::Buffer<ffi::F32, 2> factors,
                      ffi::Buffer<kType, 4> gate_up, ffi::Buffer<kType, 3> down,
                      ffi::Buffer<kType, 3> gate_up_bias, ffi::Buffer<kType, 2> down_bias,
                      ffi::ResultBuffer<ffi::F32, 2> y, ffi::ResultBuffer<kType, 2> inner,
                      float slope, float offset, float limit) {
  using Element = typename Kind::Element;
  const auto rows = x.dimensions(), sizes = down.dimensions(), choices = chosen.dimensions();
  const int64_t hidden_size = sizes[1], size = sizes[2];
  if (rows[1] != hidden_size || hidden_size % Kind::kStep || size % Kind::kStep)
    return ffi::Error::InvalidArgument("the inner sizes do not fit");
  auto elements = [](const auto& buffer) -> const Element* {
    return buffer.element_count() ? static_cast<const Element*>(buffer.untyped_data()) : nullptr;
  };
  Layer<Kind> layer{elements(x),
                    elements(gate_up),
                    elements(down),
                    elements(gate_up_bias),
                    elements(down_bias),
                    chosen.typed_data(),
                    factors.typed_data(),
                    y->typed_data(),
                    static_cast<Element*>(inner->untyped_data()),
                    rows[0],
                    choices[1],
                    sizes[0],
                    size,
                    hidden_size,
                    slope,
                    offset,
                    limit > 0 ? limit : std::numeric_limits<float>::infinity()};
  layer.Sort();
  const int64_t num_threads = pool.num_threads();
  const auto tiles = layer.Tiles(num_threads);
  const int64_t about = std::max<int64_t>(1, hidden_size / (num_threads * kTilesPerThread));
  const int64_t step = Cut(hidden_size, about, kGrain<Kind>);
  const int64_t num_tiles = tiles.size(), num_steps = (hidden_size + step - 1) / step;
  Share(pool, num_tiles + num_steps, num_tiles, [&](int64_t unit) {
    if (unit < num_tiles) return layer.Activate(tiles[unit]);
    const int64_t begin = (unit - num_tiles) * step;
    layer.AddOutputs({begin, std::min(begin + step, hidden_size)});
  });
  return ffi::Error::Success();
}

template <ffi::DataType kType>
auto Signature() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<ffi::Buffer<kType, 2>>()
      .template Arg<ffi::Buffer<ffi::S32, 2>>()
      .template Arg<ffi::Buffer<ffi::F32, 2>>()
      .template Arg<ffi::Buffer<kType, 4>>()
      .template Arg<ffi::Buffer<kType, 3>>()
      .template Arg<ffi::Buffer<kType, 3>>()
      .template Arg<ffi::Buffer<kType, 2>>()
      .template Ret<ffi::Buffer<ffi::F32, 2>>()
      .template Ret<ffi::Buffer<kType, 2>>()
      .template Attr<float>("slope")
      .template Attr<float>("offset")
      .template Attr<float>("limit");
}

}  // namespace

#ifdef JAXLLM_FLOAT32
constexpr auto ExpertsF32 = RunExperts<ffi::F32, Float32>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_experts_f32, ExpertsF32, Signature<ffi::F32>());
#endif
#ifdef JAXLLM_BFLOAT16
constexpr auto ExpertsBF16 = RunExperts<ffi::BF16, BFloat16>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_experts_bf16, ExpertsBF16, Signature<ffi::BF16>());
#endif
