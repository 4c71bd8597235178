// Self-attention over whole rows: every token sees all tokens of its row, or those within reach, or
// those up to itself.
//
// A thread takes some queries of a row and all heads that share keys: the lines of a stretch. It
// lays out a block of keys, and one of values, so that a block of lines multiplies vectors that
// follow each other, and goes on to the next block. Everything is float32. Blocks begin at the
// first token that the stretch sees, so that a row has the same bits alone and among others. Scores
// that are no numbers make outputs that are none.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "native/ffi.h"
#include "native/rows.h"
#include "native/threads.h"
#include "native/vectors.h"

namespace {

using namespace jaxllm;

// So many lines and vectors have their sums in registers, beside the vectors and an element.
constexpr int kVectors = 2;
constexpr int kLines = kNumRegisters == 32 ? 12 : 6;
constexpr int kWidth = kVectors * kLanes;
// Lines and keys of a block: its scores, keys and values stay in the L2 cache.
constexpr int64_t kMostLines = 192;
constexpr int64_t kMostKeys = 128;
// Less than any score, and finite: its difference from itself is a number.
constexpr float kLeast = -1e30f;
// The score of what a line does not see. Its weight is zero, whatever the other scores are.
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

inline int64_t RoundUp(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// q [tokens, heads, size], k [tokens, kv heads, size]; v and out have the size of values.
template <typename Kind>
struct Layer {
  using Element = typename Kind::Element;

  const Element *q, *k, *v;
  Element* out;
  int64_t num_tokens, num_heads, num_kv_heads, size, value_size;
  float scale;
  int64_t reach;  // negative: a token sees all of its row
  bool causal;    // a token sees none behind itself

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t query(int64_t token, int64_t head) const { return (token * num_heads + head) * size; }
  int64_t key(int64_t token, int64_t head) const { return (token * num_kv_heads + head) * size; }
  int64_t value(int64_t token, int64_t head) const {
    return (token * num_kv_heads + head) * value_size;
  }
  int64_t output(int64_t token, int64_t head) const {
    return (token * num_heads + head) * value_size;
  }
};

// Tokens, and the row that they belong to.
struct Stretch {
  int64_t begin, end, row_begin, row_end;
};

// A matrix of `depth` rows in panels of kWidth columns, each of which is contiguous.
struct Panels {
  const float* data;
  int64_t depth, width;
};

// Heads of other tokens are far apart, so a processor does not fetch them by itself.
constexpr int64_t kAhead = 12;

template <int kWrites, typename Element>
inline void Prefetch(const Element* head, int64_t size) {
  for (int64_t d = 0; d < size; d += 64 / sizeof(Element)) __builtin_prefetch(head + d, kWrites);
}

// y[line, n] += sum over d of x[line, d] * matrix[d, n], for a block of lines.
inline void MultiplyLines(const float* x, int64_t x_stride, const Panels& matrix, float* y,
                          int64_t y_stride) {
  for (int64_t column = 0; column < matrix.width; column += kWidth) {
    const float* panel = matrix.data + column * matrix.depth;
    Floats sums[kLines][kVectors];
    for (int line = 0; line < kLines; ++line)
      for (int i = 0; i < kVectors; ++i)
        sums[line][i] = LoadVector<Floats>(y + line * y_stride + column + i * kLanes);
    for (int64_t d = 0; d < matrix.depth; ++d, panel += kWidth) {
      Floats vectors[kVectors];
      for (int i = 0; i < kVectors; ++i) vectors[i] = LoadVector<Floats>(panel + i * kLanes);
      for (int line = 0; line < kLines; ++line) {
        const Floats element = x[line * x_stride + d] - Floats{};
        for (int i = 0; i < kVectors; ++i) AddProduct(sums[line][i], element, vectors[i]);
      }
    }
    for (int line = 0; line < kLines; ++line)
      for (int i = 0; i < kVectors; ++i)
        Float32::Store(sums[line][i], y + line * y_stride + column + i * kLanes);
  }
}

// What a thread holds of a stretch and of a block of keys.
class Attention {
 public:
  template <typename Kind>
  void Compute(const Layer<Kind>& layer, const Stretch& stretch, int64_t kv_head) {
    const int64_t first_head = kv_head * layer.group();
    num_lines_ = (stretch.end - stretch.begin) * layer.group();
    width_ = RoundUp(layer.value_size, kWidth);
    Begin(layer, stretch, first_head);
    const int64_t low = FirstSeen(layer, stretch.begin, stretch);
    const int64_t high = EndOfSeen(layer, stretch.end - 1, stretch);
    for (int64_t key = low; key < high; key += kMostKeys)
      AddBlock(layer, stretch, kv_head, key, std::min(key + kMostKeys, high));
    End(layer, stretch, first_head);
  }

 private:
  template <typename Kind>
  static int64_t FirstSeen(const Layer<Kind>& layer, int64_t token, const Stretch& stretch) {
    return layer.reach < 0 ? stretch.row_begin : std::max(stretch.row_begin, token - layer.reach);
  }
  template <typename Kind>
  static int64_t EndOfSeen(const Layer<Kind>& layer, int64_t token, const Stretch& stretch) {
    if (layer.causal) return token + 1;
    return layer.reach < 0 ? stretch.row_end : std::min(stretch.row_end, token + layer.reach + 1);
  }

  // Lines are the heads of one query after another, and in the end lines of zeros.
  template <typename Kind>
  void Begin(const Layer<Kind>& layer, const Stretch& stretch, int64_t first_head) {
    const int64_t whole = RoundUp(num_lines_, kLines);
    queries_.assign(whole * layer.size, 0.0f);
    scores_.resize(whole * kMostKeys);
    sums_.assign(whole * width_, 0.0f);
    largest_.assign(num_lines_, kLeast);
    totals_.assign(num_lines_, 0.0f);
    for (int64_t line = 0; line < num_lines_; ++line) {
      const int64_t token = stretch.begin + line / layer.group();
      const int64_t head = first_head + line % layer.group();
      const auto* q = layer.q + layer.query(token, head);
      Prefetch<0>(layer.q + layer.query(token + kAhead, head), layer.size);
      Prefetch<1>(layer.out + layer.output(token, head), layer.value_size);
      for (int64_t d = 0; d < layer.size; ++d)
        queries_[line * layer.size + d] = Widen(q[d]) * layer.scale;
    }
  }

  template <typename Kind>
  void AddBlock(const Layer<Kind>& layer, const Stretch& stretch, int64_t kv_head, int64_t begin,
                int64_t end) {
    const int64_t num_keys = end - begin, columns = RoundUp(num_keys, kWidth);
    keys_.assign(columns * layer.size, 0.0f);
    values_.assign(width_ * num_keys, 0.0f);
    for (int64_t key = 0; key < num_keys; ++key) {
      const auto* k = layer.k + layer.key(begin + key, kv_head);
      const auto* v = layer.v + layer.value(begin + key, kv_head);
      Prefetch<0>(k + kAhead * layer.num_kv_heads * layer.size, layer.size);
      Prefetch<0>(v + kAhead * layer.num_kv_heads * layer.value_size, layer.value_size);
      float* column = &keys_[key / kWidth * kWidth * layer.size + key % kWidth];
      for (int64_t d = 0; d < layer.size; ++d) column[d * kWidth] = Widen(k[d]);
      for (int64_t d = 0; d < layer.value_size; ++d)
        values_[(d / kWidth * num_keys + key) * kWidth + d % kWidth] = Widen(v[d]);
    }
    // Of a causal row, lines of tokens before the block see none of it.
    const int64_t before = layer.causal ? std::max<int64_t>(begin - stretch.begin, 0) : 0;
    const int64_t first = before * layer.group() / kLines * kLines;
    for (int64_t line = first; line < num_lines_; line += kLines) {
      float* scores = &scores_[line * kMostKeys];
      std::fill_n(scores, kLines * kMostKeys, 0.0f);
      MultiplyLines(&queries_[line * layer.size], layer.size, {&keys_[0], layer.size, columns},
                    scores, kMostKeys);
      for (int64_t i = line; i < std::min(line + kLines, num_lines_); ++i) {
        const int64_t token = stretch.begin + i / layer.group();
        Weigh(i, std::max<int64_t>(0, FirstSeen(layer, token, stretch) - begin),
              std::min(num_keys, EndOfSeen(layer, token, stretch) - begin), columns);
      }
      MultiplyLines(scores, kMostKeys, {&values_[0], num_keys, width_}, &sums_[line * width_],
                    width_);
    }
  }

  // Make a line's scores weights of the keys from `first` to `end` that it sees of a block, and zero
  // for others.
  void Weigh(int64_t line, int64_t first, int64_t end, int64_t columns) {
    float* scores = &scores_[line * kMostKeys];
    if (first >= end) {
      std::fill_n(scores, columns, 0.0f);
      return;
    }
    std::fill(scores, scores + first, kUnseen);
    std::fill(scores + end, scores + columns, kUnseen);
    Floats most = kLeast - Floats{};
    for (int64_t i = 0; i < columns; i += kLanes) {
      const Floats scored = LoadVector<Floats>(scores + i);
      most = scored > most ? scored : most;
    }
    const float largest = std::max(largest_[line], Largest(most));
    if (largest > largest_[line]) {
      const float keeps = Exp(largest_[line] - largest - Floats{})[0];
      totals_[line] *= keeps;
      float* sums = &sums_[line * width_];
      for (int64_t i = 0; i < width_; ++i) sums[i] *= keeps;
      largest_[line] = largest;
    }
    Floats total{};
    for (int64_t i = 0; i < columns; i += kLanes) {
      const Floats weights = Exp(LoadVector<Floats>(scores + i) - largest);
      Float32::Store(weights, scores + i);
      total += weights;
    }
    totals_[line] += Sum(total);
  }

  template <typename Kind>
  void End(const Layer<Kind>& layer, const Stretch& stretch, int64_t first_head) {
    for (int64_t line = 0; line < num_lines_; ++line) {
      const int64_t token = stretch.begin + line / layer.group();
      auto* out = layer.out + layer.output(token, first_head + line % layer.group());
      const float* sums = &sums_[line * width_];
      int64_t d = 0;
      for (; d + kLanes <= layer.value_size; d += kLanes)
        Kind::Store(LoadVector<Floats>(sums + d) / totals_[line], out + d);
      if (d == layer.value_size) continue;
      typename Kind::Element rest[kLanes];
      Kind::Store(LoadVector<Floats>(sums + d) / totals_[line], rest);
      std::copy_n(rest, layer.value_size - d, out + d);
    }
  }

  int64_t num_lines_, width_;  // width_: of values, with zeros to whole panels
  std::vector<float> queries_, scores_, sums_, largest_, totals_, keys_, values_;
};

// The stretches of all rows. Empty rows are padding and have none.
std::vector<Stretch> CutRows(const int32_t* starts, const int32_t* ends, int64_t num_rows,
                             int64_t most) {
  std::vector<Stretch> stretches;
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t begin = starts[row]; begin < ends[row]; begin += most)
      stretches.push_back(
          {begin, std::min<int64_t>(begin + most, ends[row]), starts[row], ends[row]});
  return stretches;
}

template <ffi::DataType kType, typename Kind>
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<kType, 3> q, ffi::Buffer<kType, 3> k,
                  ffi::Buffer<kType, 3> v, ffi::Buffer<ffi::S32, 1> query_starts,
                  ffi::Buffer<ffi::S32, 1> query_ends, ffi::ResultBuffer<kType, 3> out, float scale,
                  int64_t reach, bool causal) {
  using Element = typename Kind::Element;
  const auto queries = q.dimensions(), keys = k.dimensions(), values = v.dimensions();
  const auto outputs = out->dimensions();
  const int32_t *starts = query_starts.typed_data(), *ends = query_ends.typed_data();
  const int64_t num_rows = query_starts.dimensions()[0] - 1;
  for (int axis = 0; axis < 2; ++axis)
    if (values[axis] != keys[axis] || outputs[axis] != queries[axis])
      return ffi::Error::InvalidArgument("the sizes do not fit");
  if (queries[0] != keys[0] || queries[2] != keys[2] || keys[1] == 0 || queries[1] % keys[1] ||
      outputs[2] != values[2] || num_rows < 0 || query_ends.dimensions()[0] != num_rows)
    return ffi::Error::InvalidArgument("the sizes do not fit");
  if (!std::is_sorted(starts, starts + num_rows + 1) || starts[0] != 0 ||
      starts[num_rows] > queries[0])
    return ffi::Error::InvalidArgument("the rows are not within the batch");
  for (int64_t row = 0; row < num_rows; ++row)
    if (ends[row] < starts[row] || ends[row] > starts[row + 1])
      return ffi::Error::InvalidArgument("the rows are not within the batch");
  const Layer<Kind> layer{reinterpret_cast<const Element*>(q.untyped_data()),
                          reinterpret_cast<const Element*>(k.untyped_data()),
                          reinterpret_cast<const Element*>(v.untyped_data()),
                          reinterpret_cast<Element*>(out->untyped_data()),
                          queries[0],
                          queries[1],
                          keys[1],
                          queries[2],
                          values[2],
                          scale,
                          reach,
                          causal};
  const auto stretches =
      CutRows(starts, ends, num_rows, std::max<int64_t>(1, kMostLines / layer.group()));
  Share(pool, {int64_t(stretches.size()) * layer.num_kv_heads}, [&](int64_t, int64_t unit) {
    thread_local Attention attention;  // keeps its memory
    attention.Compute(layer, stretches[unit / layer.num_kv_heads], unit % layer.num_kv_heads);
  });
  // Tokens between rows and behind the last one are padding.
  for (int64_t row = 0; row < num_rows; ++row)
    std::fill(layer.out + layer.output(ends[row], 0), layer.out + layer.output(starts[row + 1], 0),
              Element{});
  std::fill(layer.out + layer.output(starts[num_rows], 0),
            layer.out + layer.output(queries[0], 0), Element{});
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_self_attention_f32, (Attend<ffi::F32, Float32>), "scale", "reach",
                "causal")
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_self_attention_bf16, (Attend<ffi::BF16, BFloat16>), "scale", "reach",
                "causal")
#endif
