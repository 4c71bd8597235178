// Writes a step's keys and values into the pages of a layer, and computes the attention of its
// tokens.
//
// Tokens of a row are cut into tiles. A thread takes a tile and a kv head at a time. A line is a
// query of a token; all lines of a tile share each load of a key or value. Keys are processed in
// chunks that begin at fixed places of the context, and in fixed order within a chunk. A key that a
// line does not see does not change its result. So a token's result does not depend on the rest of
// the batch.
//
// A page of a kv head is a panel of keys and a panel of values, in 32-bit words (`vectors.h`). Keys
// are [head_size / per word][tokens]: a vector has the same elements of many keys, and scores need
// no sums over lanes. Values are [tokens / per word][value_size]. Pages have room for whole vectors
// of tokens, even if blocks have fewer tokens.
//
// Latents (`mla/native.cc`) are keys and values in one: a page has them once, as values, and their
// beginnings are the values. A tile makes keys of those that it sees.
//
// A cache may have codes of 8 bits (`codes.h`) in the places of elements. Keys and values come as
// codes. Those of a kv head share a scale, which multiplies the scores, or the outputs.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "native/codes.h"
#include "native/ffi.h"
#include "native/threads.h"
#include "native/vectors.h"

namespace {

using namespace jaxllm;

constexpr int kTileLines = 64;
// Sizes of the blocks in registers.
constexpr int kBlockLines = 4;
constexpr int kBlockGroups = kNumRegisters / 8;
constexpr int kBlockVectors = kNumRegisters / 8;
// A group is a vector of keys. The groups of a chunk share a step of the running softmax.
constexpr int kChunkGroups = 8;
constexpr int kChunkKeys = kChunkGroups * kLanes;
static_assert(kChunkGroups % kBlockGroups == 0, "a chunk is computed in blocks of groups");

// The score of a key that is not seen. It is finite, so that differences of scores are not NaN.
constexpr float kUnseen = std::numeric_limits<float>::lowest();

inline Floats Tanh(const Floats& x) {
  const Floats e = Exp(x > 0.0f ? -2.0f * x : 2.0f * x);
  const Floats y = (1.0f - e) / (1.0f + e);
  return x > 0.0f ? y : -y;
}

template <typename Kind>
struct Layer {
  using Element = typename Kind::Element;
  using Cached = typename Kind::Weight;
  const Element* q;
  const Cached *k, *v;
  Cached* cache;
  Element* out;
  const float* sinks;  // null: none
  const float* scales;  // of codes: the keys' of each kv head, then the values'
  const int32_t *query_starts, *context_lens, *block_tables;
  const int32_t* last_seen;  // of each token; null: itself
  int64_t num_tokens, num_rows, max_blocks, num_blocks;
  int64_t num_heads, num_kv_heads, head_size, value_size;
  int64_t block_size;
  int64_t page_tokens;  // block_size, rounded up to vectors
  bool has_latents;
  int64_t heads_at_once;  // of a kv head, in a tile
  int64_t window;       // 0: none
  int64_t chunk;        // 0: none
  float scale, soft_cap;  // 0: none
  // Rows without a context that bring so many tokens are written, and attend to nothing. 0: none.
  int64_t fewest_fresh = 0;

  int64_t group_size() const { return num_heads / num_kv_heads; }
  int64_t parts() const { return (group_size() + heads_at_once - 1) / heads_at_once; }
  float score_scale(int64_t kv_head) const {
    if constexpr (Kind::kHasScales) return scale * Kind::kUnit * scales[kv_head];
    return scale;
  }
  float value_scale(int64_t kv_head) const {
    if constexpr (Kind::kHasScales) return Kind::kUnit * scales[num_kv_heads + kv_head];
    return 1;
  }
  int64_t key_panel_size() const { return has_latents ? 0 : page_tokens * head_size; }
  // The size of a row of the panel of values.
  int64_t value_stride() const { return has_latents ? head_size : value_size; }
  // From an element of many keys to the next one, in words.
  int64_t key_stride() const { return has_latents ? kLanes : page_tokens; }
  // The position of a row's first token of this step.
  int64_t first_position(int64_t row) const {
    return context_lens[row] - (query_starts[row + 1] - query_starts[row]);
  }
  bool is_fresh(int64_t row) const {
    return fewest_fresh > 0 && first_position(row) == 0 && context_lens[row] >= fewest_fresh;
  }
  // The first position that a token at a position sees.
  int64_t first_seen(int64_t position) const {
    if (chunk > 0) return position / chunk * chunk;
    return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
  }
  // The position after the last one that a token at a position sees.
  int64_t seen_end(int64_t token, int64_t position) const {
    return 1 + (last_seen == nullptr ? position : last_seen[token]);
  }
  // The group of keys that contains a position.
  int64_t GroupOf(int64_t position) const {
    return position / block_size * (page_tokens / kLanes) + position % block_size / kLanes;
  }
  // The keys of a block; the values follow them.
  Cached* Panel(int64_t row, int64_t index, int64_t kv_head) const {
    const int64_t block = block_tables[row * max_blocks + index];
    return cache + (block * num_kv_heads + kv_head) *
                       (key_panel_size() + page_tokens * value_stride());
  }
};

// Consecutive tokens of a row.
struct Tile {
  int64_t row, token, num_tokens, position;
};

// The tiles of all rows, with the most work first.
template <typename Kind>
std::vector<Tile> CutTiles(const Layer<Kind>& layer) {
  const int64_t tile_tokens = std::max<int64_t>(kTileLines / layer.heads_at_once, 1);
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < layer.num_rows; ++row) {
    const int64_t begin = layer.query_starts[row], end = layer.query_starts[row + 1];
    for (int64_t token = begin; token < end; token += tile_tokens)
      tiles.push_back({row, token, std::min(tile_tokens, end - token),
                       layer.first_position(row) + token - begin});
  }
  auto work = [&layer](const Tile& tile) {
    if (layer.is_fresh(tile.row)) return int64_t(0);
    const int64_t end = tile.position + tile.num_tokens;
    return tile.num_tokens * (end - layer.first_seen(tile.position));
  };
  std::stable_sort(tiles.begin(), tiles.end(),
                   [&](const Tile& a, const Tile& b) { return work(a) > work(b); });
  return tiles;
}

template <typename Kind>
void WriteTile(const Layer<Kind>& layer, const Tile& tile) {
  constexpr int kPerWord = Kind::kPerWord;
  const int64_t head_size = layer.has_latents ? 0 : layer.head_size;  // of keys
  const int64_t value_size = layer.value_stride();
  for (int64_t kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head) {
    for (int64_t i = 0; i < tile.num_tokens; ++i) {
      const int64_t position = tile.position + i;
      const int64_t place = position % layer.block_size;
      auto* keys = layer.Panel(tile.row, position / layer.block_size, kv_head);
      auto* values = keys + layer.key_panel_size();
      const int64_t from = (tile.token + i) * layer.num_kv_heads + kv_head;
      for (int64_t h = 0; h < head_size; ++h)
        keys[(h / kPerWord * layer.page_tokens + place) * kPerWord + h % kPerWord] =
            layer.k[from * head_size + h];
      for (int64_t h = 0; h < value_size; ++h)
        values[(place / kPerWord * value_size + h) * kPerWord + place % kPerWord] =
            layer.v[from * value_size + h];
    }
  }
}

// A vector of keys. Those in [begin, end) are in the context and seen by at least one line.
template <typename Kind>
struct Group {
  const typename Kind::Weight *keys, *values;
  int64_t position;
  int begin, end;
};

// A query and its running softmax.
template <typename Kind>
struct Line {
  const typename Kind::Element* q;
  int64_t position;
  int64_t end;  // after the last position that it sees
  float largest;
  Floats total;  // by lane
};

template <typename Kind>
struct Chunk {
  int64_t end;  // the group after it
  int num_groups = 0;
  Group<Kind> groups[kChunkGroups];
};

// The memory of a thread, besides registers.
template <typename Kind>
struct Scratch {
  std::vector<Line<Kind>> lines;
  std::vector<float> weighted;  // weighted sums of values, [lines][value_size]
  std::vector<typename Kind::Weight> values;  // of incomplete groups, for two chunks
  std::vector<typename Kind::Weight> keys;    // of latents, for two chunks
};

// The words of two rows of units that make the rows with corners of squares of kStep units exchanged.
template <int kSize, int kStep>
struct Corners {
  int32_t above[kLanes], below[kLanes];

  constexpr Corners() : above(), below() {
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool is_left = (lane / kSize & kStep) == 0;
      above[lane] = is_left ? lane : kLanes + lane - kStep * kSize;
      below[lane] = is_left ? lane + kStep * kSize : kLanes + lane;
    }
  }
};

// Exchange rows and columns of units of kSize words: unit j of row i becomes unit i of row j. It is
// done for the corners of squares of 2 kStep units, then for those of larger ones.
template <int kSize, int kStep = 1>
inline void Transpose(Words (&rows)[kLanes / kSize]) {
  constexpr int kUnits = kLanes / kSize;
#if defined(__AVX512F__)
  if constexpr (kStep < kUnits) {
    static constexpr Corners<kSize, kStep> kCorners;
    const auto above = LoadVector<__m512i>(kCorners.above);
    const auto below = LoadVector<__m512i>(kCorners.below);
#pragma GCC unroll 16
    for (int i = 0; i < kUnits; ++i) {
      if (i & kStep) continue;
      const auto first = (__m512i)rows[i], second = (__m512i)rows[i + kStep];
      rows[i] = (Words)_mm512_permutex2var_epi32(first, above, second);
      rows[i + kStep] = (Words)_mm512_permutex2var_epi32(first, below, second);
    }
    Transpose<kSize, 2 * kStep>(rows);
  }
#else
  Words columns[kUnits];
  for (int i = 0; i < kUnits; ++i)
    for (int lane = 0; lane < kLanes; ++lane)
      columns[i][lane] = rows[lane / kSize][i * kSize + lane % kSize];
  std::memcpy(rows, columns, sizeof(columns));
#endif
}

// Make a group of keys, [size / per word][lanes], of latents [lanes / per word][size], in words.
template <typename Kind>
inline void MakeKeys(const typename Kind::Weight* latents, int64_t size,
                     typename Kind::Weight* keys) {
  constexpr int kPerWord = Kind::kPerWord;
  static_assert(kPerWord <= 2, "words have elements, or pairs of them");
  for (int64_t h = 0; h < size; h += kLanes) {
    Words rows[kLanes / kPerWord];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / kPerWord; ++i) {
      rows[i] = LoadVector<Words>(latents + (i * size + h) * kPerWord);
      if constexpr (kPerWord == 2) {
        // Two words have two elements of two tokens. Make them words of a token each.
        const auto pairs = (Longs)rows[i];
        rows[i] = (Words)((pairs & 0xffff00000000ffffu) | (pairs >> 16 & 0xffff0000u) |
                          (pairs & 0xffff0000u) << 16);
      }
    }
    Transpose<kPerWord>(rows);
    std::memcpy(keys + h * kLanes, rows, sizeof(rows));
  }
}

// Prefetch data that the processor's own prefetcher does not predict.
inline void Prefetch(const void* from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64)
    __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// Find the keys of a chunk, from group `first` on. For groups that are only partly in [begin, end),
// copy the values and replace those outside by zeros: they may be NaN, which a weight of zero would
// not remove.
template <typename Kind>
Chunk<Kind> FindKeys(const Layer<Kind>& layer, const Tile& tile, int64_t kv_head, int64_t begin,
                     int64_t end, int64_t first, Scratch<Kind>& scratch) {
  const int64_t groups_per_block = layer.page_tokens / kLanes;
  const int64_t values_size = kLanes * layer.value_stride();
  const int64_t end_of_chunk = (first / kChunkGroups + 1) * kChunkGroups;
  Chunk<Kind> chunk{std::min(end_of_chunk, layer.GroupOf(end - 1) + 1)};
  for (int64_t i = first; i < chunk.end; ++i) {
    const int64_t index = i / groups_per_block, place = i % groups_per_block * kLanes;
    const int64_t position = index * layer.block_size + place;
    const auto* panel = layer.Panel(tile.row, index, kv_head);
    const auto* keys = panel + place * Kind::kPerWord;
    const auto* values = panel + layer.key_panel_size() + place * layer.value_stride();
    if constexpr (Kind::kPerWord <= 2) {
      if (layer.has_latents) {
        auto* made = scratch.keys.data() + i % (2 * kChunkGroups) * values_size;
        MakeKeys<Kind>(values, layer.head_size, made);
        keys = made;
      }
    }
    if (!layer.has_latents) {
      for (int64_t h = 0; h < layer.head_size; h += Kind::kPerWord)
        Prefetch(keys + h * layer.page_tokens, Kind::kStep * sizeof(*keys));
      Prefetch(values, values_size * sizeof(*values));
    }
    Group<Kind> group{keys, values, position, 0, kLanes};
    group.begin = std::max<int64_t>(begin - position, 0);
    group.end = std::clamp<int64_t>(std::min(end - position, layer.block_size - place), 0, kLanes);
    if (group.begin > 0 || group.end < kLanes) {
      auto* copy = scratch.values.data() + i % (2 * kChunkGroups) * values_size;
      std::fill_n(copy, values_size, 0);
      for (int j = group.begin; j < group.end; ++j)
        for (int64_t h = 0; h < layer.value_size; ++h) {
          const int64_t at = (j / Kind::kPerWord * layer.value_stride() + h) * Kind::kPerWord;
          copy[at + j % Kind::kPerWord] = values[at + j % Kind::kPerWord];
        }
      group.values = copy;
    }
    chunk.groups[chunk.num_groups++] = group;
  }
  return chunk;
}

// Products of a block of lines with the keys of a block of groups.
template <int kLines, typename Kind>
inline void MultiplyKeys(const Layer<Kind>& layer, const Line<Kind>* lines,
                         const Chunk<Kind>& chunk, int first, Floats (*scores)[kChunkGroups]) {
  const typename Kind::Weight* keys[kBlockGroups];
  for (int j = 0; j < kBlockGroups; ++j)
    keys[j] = chunk.groups[std::min(first + j, chunk.num_groups - 1)].keys;
  Floats sums[kLines][kBlockGroups] = {};
  const int64_t stride = layer.key_stride() * Kind::kPerWord;
  for (int64_t h = 0; h < layer.head_size; h += Kind::kPerWord) {
    typename Kind::Loaded loaded[kBlockGroups];
    for (int j = 0; j < kBlockGroups; ++j) {
      loaded[j] = Kind::LoadWeight(keys[j]);
      keys[j] += stride;
    }
    for (int l = 0; l < kLines; ++l) {
      const auto q = Kind::Broadcast(lines[l].q + h);
      for (int j = 0; j < kBlockGroups; ++j) Kind::Add(sums[l][j], q, loaded[j]);
    }
  }
  for (int l = 0; l < kLines; ++l)
    for (int j = 0; j < kBlockGroups; ++j) scores[l][first + j] = sums[l][j];
}

// Turn a line's scores of a chunk into weights; return the factor for the older weights.
template <typename Kind>
inline float Weigh(const Layer<Kind>& layer, float scale, Line<Kind>& line,
                   const Chunk<Kind>& chunk, Floats* scores, typename Kind::Element* weights) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const int64_t first_seen = layer.first_seen(line.position);
  Ints is_seen[kChunkGroups];
  Floats largest = kUnseen - Floats{};
  for (int j = 0; j < chunk.num_groups; ++j) {
    const Group<Kind>& group = chunk.groups[j];
    const int begin = std::clamp<int64_t>(first_seen - group.position, group.begin, kLanes);
    const int end = std::clamp<int64_t>(line.end - group.position, 0, group.end);
    is_seen[j] = (lane >= begin) & (lane < end);
    Floats score = scale * scores[j];
    if (layer.soft_cap > 0) score = layer.soft_cap * Tanh(score / layer.soft_cap);
    scores[j] = is_seen[j] ? score : kUnseen - Floats{};
    largest = largest > scores[j] ? largest : scores[j];
  }
  const float new_largest = std::max(line.largest, Largest(largest));
  const float decay = Exp((line.largest - new_largest) - Floats{})[0];
  line.largest = new_largest;
  line.total *= decay;
  for (int j = 0; j < chunk.num_groups; ++j) {
    const Floats weight = is_seen[j] ? Exp(scores[j] - new_largest) : Floats{};
    line.total += weight;
    Kind::Store(weight, weights + j * kLanes);
  }
  return decay;
}

// Add a chunk's weighted values, for a block of lines and some vectors of their outputs.
template <int kLines, int kVectors, typename Kind>
inline void AddValues(const Layer<Kind>& layer, const Chunk<Kind>& chunk,
                      const typename Kind::Element (*weights)[kChunkKeys], const float* decays,
                      int64_t h, float* weighted) {
  Floats sums[kLines][kVectors];
  for (int l = 0; l < kLines; ++l)
    for (int i = 0; i < kVectors; ++i)
      sums[l][i] =
          decays[l] * LoadVector<Floats>(weighted + l * layer.value_size + h + i * kLanes);
  for (int j = 0; j < chunk.num_groups; ++j) {
    const auto* values = chunk.groups[j].values + h * Kind::kPerWord;
    for (int key = 0; key < kLanes; key += Kind::kPerWord) {
      typename Kind::Loaded loaded[kVectors];
      for (int i = 0; i < kVectors; ++i) loaded[i] = Kind::LoadWeight(values + i * Kind::kStep);
      for (int l = 0; l < kLines; ++l) {
        const auto weight = Kind::Broadcast(weights[l] + j * kLanes + key);
        for (int i = 0; i < kVectors; ++i) Kind::Add(sums[l][i], weight, loaded[i]);
      }
      values += layer.value_stride() * Kind::kPerWord;
    }
  }
  for (int l = 0; l < kLines; ++l)
    for (int i = 0; i < kVectors; ++i)
      std::memcpy(weighted + l * layer.value_size + h + i * kLanes, &sums[l][i], sizeof(Floats));
}

// Fold a chunk into the softmax of a block of lines.
template <int kLines, typename Kind>
inline void AttendLines(const Layer<Kind>& layer, float scale, const Chunk<Kind>& chunk,
                        Line<Kind>* lines, float* weighted) {
  Floats scores[kLines][kChunkGroups];
  alignas(64) typename Kind::Element weights[kLines][kChunkKeys];
  float decays[kLines];
  for (int first = 0; first < chunk.num_groups; first += kBlockGroups)
    MultiplyKeys<kLines>(layer, lines, chunk, first, scores);
  for (int l = 0; l < kLines; ++l)
    decays[l] = Weigh(layer, scale, lines[l], chunk, scores[l], weights[l]);
  int64_t h = 0;
  for (; h + kBlockVectors * kLanes <= layer.value_size; h += kBlockVectors * kLanes)
    AddValues<kLines, kBlockVectors>(layer, chunk, weights, decays, h, weighted);
  for (; h < layer.value_size; h += kLanes)
    AddValues<kLines, 1>(layer, chunk, weights, decays, h, weighted);
}

// Compute the attention of a tile's queries that share a kv head, or of a part of its heads.
template <typename Kind>
void AttendTile(const Layer<Kind>& layer, const Tile& tile, int64_t kv_head, int64_t part) {
  thread_local Scratch<Kind> scratch;
  const int64_t head_size = layer.head_size, value_size = layer.value_size;
  const int64_t first_head = kv_head * layer.group_size() + part * layer.heads_at_once;
  const int64_t num_heads =
      std::min(layer.heads_at_once, layer.group_size() - part * layer.heads_at_once);
  const int64_t num_lines = tile.num_tokens * num_heads;
  const float scale = layer.score_scale(kv_head);
  auto place = [&](int64_t line) {  // of the line's query and output, in heads
    return (tile.token + line / num_heads) * layer.num_heads + first_head + line % num_heads;
  };
  auto& lines = scratch.lines;
  lines.resize(num_lines);
  scratch.weighted.assign(num_lines * value_size, 0);
  scratch.values.resize(2 * kChunkKeys * layer.value_stride());
  if (layer.has_latents) scratch.keys.resize(2 * kChunkKeys * head_size);
  for (int64_t l = 0; l < num_lines; ++l) {
    const auto* q = layer.q + place(l) * head_size;
    const int64_t position = tile.position + l / num_heads;
    const int64_t seen_end = layer.seen_end(tile.token + l / num_heads, position);
    lines[l] = {q, position, seen_end, kUnseen, Floats{}};
    if (layer.sinks != nullptr) {
      lines[l].largest = layer.sinks[first_head + l % num_heads];
      lines[l].total[0] = 1;
    }
  }

  const int64_t begin = layer.first_seen(tile.position), end = lines[num_lines - 1].end;
  auto find = [&](int64_t group) {
    return FindKeys(layer, tile, kv_head, begin, end, group, scratch);
  };
  auto chunk = find(layer.GroupOf(begin));
  while (chunk.num_groups > 0) {
    const auto next = find(chunk.end);  // prefetched while this chunk is computed
    for (int64_t l = 0; l < num_lines; l += kBlockLines) {
      const int64_t num = std::min<int64_t>(num_lines - l, kBlockLines);
      // The last line of the block sees the most keys.
      if (lines[l + num - 1].end <= chunk.groups[0].position) continue;
      float* weighted = scratch.weighted.data() + l * value_size;
      static_assert(kBlockLines <= 4, "a block of lines is one of the cases below");
      switch (num) {
        case 4: AttendLines<4>(layer, scale, chunk, &lines[l], weighted); break;
        case 3: AttendLines<3>(layer, scale, chunk, &lines[l], weighted); break;
        case 2: AttendLines<2>(layer, scale, chunk, &lines[l], weighted); break;
        case 1: AttendLines<1>(layer, scale, chunk, &lines[l], weighted); break;
      }
    }
    chunk = next;
  }

  for (int64_t l = 0; l < num_lines; ++l) {
    const float share = layer.value_scale(kv_head) / Sum(lines[l].total);
    const float* weighted = scratch.weighted.data() + l * value_size;
    auto* out = layer.out + place(l) * value_size;
    for (int64_t h = 0; h < value_size; h += kLanes)
      Kind::Store(share * LoadVector<Floats>(weighted + h), out + h);
  }
}

// Whether everything that the step refers to exists. Otherwise memory would be corrupted.
template <typename Kind>
bool IsWithinBounds(const Layer<Kind>& layer) {
  int64_t token = 0;
  for (int64_t row = 0; row < layer.num_rows; ++row) {
    const int64_t end = layer.query_starts[row + 1];
    if (layer.query_starts[row] != token || end < token) return false;
    if (end > token) {
      const int64_t position = layer.first_position(row), length = layer.context_lens[row];
      if (position < 0 || length > layer.max_blocks * layer.block_size) return false;
      for (int64_t i = token; layer.last_seen != nullptr && i < end; ++i) {
        const int64_t least = i > token ? layer.last_seen[i - 1] : 0;
        const int64_t itself = position + i - token;
        if (layer.last_seen[i] < std::max(least, itself) || layer.last_seen[i] >= length)
          return false;
      }
      const int64_t last = (length - 1) / layer.block_size;
      for (int64_t i = layer.first_seen(position) / layer.block_size; i <= last; ++i) {
        const int64_t block = layer.block_tables[row * layer.max_blocks + i];
        if (block < 0 || block >= layer.num_blocks) return false;
      }
    }
    token = end;
  }
  return token <= layer.num_tokens;
}

// Write and attend.
template <typename Kind>
void Compute(const Layer<Kind>& layer, const std::vector<Tile>& tiles, ffi::ThreadPool& pool) {
  const int64_t num_tiles = tiles.size(), parts = layer.parts();
  const int64_t units_per_tile = layer.num_kv_heads * parts;
  Share(pool, {num_tiles, num_tiles * units_per_tile}, [&](int64_t phase, int64_t unit) {
    if (phase == 0) return WriteTile(layer, tiles[unit]);
    const int64_t of_tile = unit % units_per_tile;
    if (layer.is_fresh(tiles[unit / units_per_tile].row)) return;
    AttendTile(layer, tiles[unit / units_per_tile], of_tile / parts, of_tile % parts);
  });
  const int64_t token_size = layer.num_heads * layer.value_size;
  const int64_t num_real = layer.query_starts[layer.num_rows];
  std::fill(layer.out + num_real * token_size, layer.out + layer.num_tokens * token_size, 0);
}

template <ffi::DataType kType, ffi::DataType kCached, typename Kind>
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<kType, 3> q, ffi::Buffer<kCached, 3> k,
                  ffi::Buffer<kCached, 3> v, ffi::Buffer<kCached, 5> cache,
                  ffi::Buffer<ffi::S32, 1> query_starts, ffi::Buffer<ffi::S32, 1> context_lens,
                  ffi::Buffer<ffi::S32, 2> block_tables, ffi::Buffer<ffi::S32, 1> last_seen,
                  ffi::Buffer<ffi::F32, 1> sinks, ffi::Buffer<ffi::F32, 1> scales, ffi::ResultBuffer<kType, 3> out,
                  ffi::ResultBuffer<kCached, 5> new_cache, float scale, int64_t sliding_window,
                  int64_t chunk, float soft_cap, int64_t block_size) {
  using Element = typename Kind::Element;
  using Cached = typename Kind::Weight;
  if (cache.untyped_data() != new_cache->untyped_data())
    return ffi::Error::InvalidArgument("the cache must be updated in place");
  const auto shape = cache.dimensions();  // [blocks, kv heads, 1 or 2, tokens, width]
  Layer<Kind> layer;
  layer.q = reinterpret_cast<const Element*>(q.untyped_data());
  layer.k = reinterpret_cast<const Cached*>(k.untyped_data());
  layer.v = reinterpret_cast<const Cached*>(v.untyped_data());
  layer.cache = reinterpret_cast<Cached*>(new_cache->untyped_data());
  layer.out = reinterpret_cast<Element*>(out->untyped_data());
  layer.sinks = sinks.element_count() > 0 ? sinks.typed_data() : nullptr;
  layer.scales = scales.typed_data();
  layer.query_starts = query_starts.typed_data();
  layer.context_lens = context_lens.typed_data();
  layer.block_tables = block_tables.typed_data();
  layer.last_seen = last_seen.element_count() > 0 ? last_seen.typed_data() : nullptr;
  layer.num_tokens = q.dimensions()[0];
  layer.num_rows = context_lens.dimensions()[0];
  layer.max_blocks = block_tables.dimensions()[1];
  layer.num_blocks = shape[0];
  layer.num_heads = q.dimensions()[1];
  layer.num_kv_heads = shape[1];
  layer.head_size = q.dimensions()[2];
  layer.value_size = v.dimensions()[2];
  layer.block_size = block_size;
  layer.page_tokens = shape[3];
  layer.has_latents = false;
  layer.heads_at_once = layer.group_size();
  layer.window = sliding_window;
  layer.chunk = chunk;
  layer.scale = scale;
  layer.soft_cap = soft_cap;
  if (layer.last_seen != nullptr && last_seen.element_count() != size_t(layer.num_tokens))
    return ffi::Error::InvalidArgument("each token must have the last one that it sees");
  if (Kind::kHasScales && scales.element_count() != size_t(2 * layer.num_kv_heads))
    return ffi::Error::InvalidArgument("codes need a scale for the keys and values of each kv head");
  if (!IsWithinBounds(layer))
    return ffi::Error::InvalidArgument("the batch refers to tokens or blocks that do not exist");

  Compute(layer, CutTiles(layer), pool);
  return ffi::Error::Success();
}

}  // namespace

// The names of Attend's attributes, in the order of its parameters.
#define JAXLLM_ATTENTION_ATTRIBUTES "scale", "sliding_window", "chunk", "soft_cap", "block_size"
