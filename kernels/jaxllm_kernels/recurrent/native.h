// What ops with a matrix for each head share: the rows of a step, whose tokens are computed one
// after the other.
//
// A unit of work is a row, some of its heads, and some of what the matrices hold for each key
// ("values"), which are independent of each other. A unit computes its tokens in tiles. For a tile
// the op reads a state once, and writes it once where it is. So no array of states is copied. What
// a token does to a state depends neither on its tile nor on other rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "native/ffi.h"
#include "native/products.h"
#include "native/threads.h"
#include "native/vectors.h"

namespace jaxllm {

// The most tokens of a tile.
constexpr int64_t kTileTokens = 32;

// Whole vectors of columns, or one that is not full.
template <int kNum>
struct Whole {
  static constexpr int kVectors = kNum;
  static Floats Load(const float* p) { return LoadVector<Floats>(p); }
  static void Store(const Floats& v, float* p) { std::memcpy(p, &v, sizeof(v)); }
};
struct Part {
  static constexpr int kVectors = 1;
  int64_t count;
  Floats Load(const float* p) const {
    float part[kLanes] = {};
    std::copy(p, p + count, part);
    return LoadVector<Floats>(part);
  }
  void Store(const Floats& v, float* p) const { std::memcpy(p, &v, sizeof(float) * count); }
};

// Memory for floats, without values, from the start of a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t size)
      : floats_(static_cast<float*>(::operator new(sizeof(float) * size, kLine))) {}

  float* get() const { return floats_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kLine); }
  };
  std::unique_ptr<float, Free> floats_;
};

// Let the processor load what is needed soon. It does not foresee it, since what a head has of two
// tokens is far from each other.
inline void Fetch(const float* begin, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(begin + i);
}

// What a call computes: tokens of a row, for some values of a head.
struct Tile {
  int64_t first, num_tokens, head;
  Range values;
};

// The states of all slots, and the rows of a step: what `recurrent/native.py` appends to operands.
class StateRows {
 public:
  StateRows(const ffi::Buffer<ffi::F32, 4>& state, const ffi::RemainingArgs& rows)
      : states_(state.typed_data()),
        num_slots_(state.dimensions()[0]),
        num_heads_(state.dimensions()[1]),
        size_(state.dimensions()[2] * state.dimensions()[3]),
        num_rows_(rows.get<ffi::Buffer<ffi::S32, 1>>(0)->dimensions()[0]),
        slots_(Numbers(rows, 0)),
        query_starts_(Numbers(rows, 1)),
        lengths_(Numbers(rows, 2)),
        num_kept_(Numbers(rows, 3)),
        begins_(rows.get<ffi::Buffer<ffi::PRED, 1>>(4)->typed_data()) {}

  // Compute all rows. make() returns what computes the tiles of a unit: a function of a tile, the
  // head's state before the tile, which is null if it is zeros, and where the next one goes, which
  // is null if nothing needs it. A head has `num_values`, which are cut at multiples of `step`.
  template <typename Make>
  void Advance(ffi::ThreadPool& pool, int64_t num_values, int64_t step, const Make& make) const {
    std::vector<int64_t> rows;
    int64_t num_tokens = 0, longest = 0;
    // The last rows first, which are the long ones.
    for (int64_t row = num_rows_ - 1; row >= 0; --row) {
      if (!is_there(row)) continue;
      rows.push_back(row);
      num_tokens += lengths_[row];
      longest = std::max<int64_t>(longest, lengths_[row]);
    }
    if (rows.empty()) return;
    const int64_t heads = std::clamp<int64_t>(kUnitElements / size_, 1, num_heads_);
    const int64_t groups = (num_heads_ + heads - 1) / heads;
    // As many parts of values as the longest row needs to occupy its share of the threads.
    const int64_t num_blocks = (num_values + step - 1) / step;
    const int64_t about = std::max<int64_t>(
        kUnitsPerThread * pool.num_threads() * longest / (num_tokens * groups), 1);
    const int64_t blocks = (num_blocks + about - 1) / about;
    const int64_t parts = (num_blocks + blocks - 1) / blocks;
    Share(pool, {int64_t(rows.size()) * groups * parts}, [&](int64_t, int64_t unit) {
      const int64_t row = rows[unit / (groups * parts)], part = unit % parts;
      const int64_t begin = unit / parts % groups * heads;
      const Range values{part * blocks * step, std::min((part + 1) * blocks * step, num_values)};
      auto advance = make();
      for (int64_t head = begin; head < std::min(begin + heads, num_heads_); ++head)
        AdvanceHead(advance, row, head, values);
    });
  }

  // Make the outputs of all tokens that no row has zeros. A token has `size` of them.
  void ClearOthers(float* outputs, int64_t num_tokens, int64_t size) const {
    int64_t begin = 0;
    for (int64_t row = 0; row < num_rows_; ++row) {
      if (!is_there(row)) continue;
      std::fill(outputs + begin * size, outputs + query_starts_[row] * size, 0.0f);
      begin = query_starts_[row] + lengths_[row];
    }
    std::fill(outputs + begin * size, outputs + num_tokens * size, 0.0f);
  }

 private:
  // Threads share no less than that.
  static constexpr int64_t kUnitElements = 1 << 14;
  static constexpr int64_t kUnitsPerThread = 4;

  static const int32_t* Numbers(const ffi::RemainingArgs& rows, size_t index) {
    return rows.get<ffi::Buffer<ffi::S32, 1>>(index)->typed_data();
  }

  bool is_there(int64_t row) const {
    return lengths_[row] > 0 && slots_[row] >= 0 && slots_[row] < num_slots_;
  }

  // Compute a head of a row: the first `num_kept` tokens, which the state goes on over, and the
  // rest, which leave none.
  template <typename Advance>
  void AdvanceHead(Advance& advance, int64_t row, int64_t head, Range values) const {
    float* state = states_ + (slots_[row] * num_heads_ + head) * size_;
    const float* from = begins_[row] ? nullptr : state;
    const int64_t first = query_starts_[row], num_tokens = lengths_[row],
                  num_kept = num_kept_[row];
    std::unique_ptr<float[]> beside;
    for (int64_t begin = 0, end; begin < num_tokens; begin = end) {
      const bool is_kept = begin < num_kept;
      end = std::min(begin + kTileTokens, is_kept ? num_kept : num_tokens);
      float* to = state;
      if (!is_kept) {
        if (!beside && end < num_tokens) beside.reset(new float[size_]);
        to = end < num_tokens ? beside.get() : nullptr;
      }
      advance(Tile{first + begin, end - begin, head, values}, from, to);
      from = to;
    }
  }

  float* states_;
  int64_t num_slots_, num_heads_, size_, num_rows_;
  const int32_t *slots_, *query_starts_, *lengths_, *num_kept_;
  const bool* begins_;
};

}  // namespace jaxllm
