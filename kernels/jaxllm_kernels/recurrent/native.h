// What ops with a matrix for each head share: the rows that they compute token by token, which are
// decodes and rows with drafts.
//
// A unit of work is a row and some of its heads. A head's state is read once for each token, and
// written where it is. So no array of states is copied, and no row depends on other rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "native/ffi.h"
#include "native/threads.h"
#include "native/vectors.h"

namespace jaxllm {

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

// The states of all slots, and the rows of a step: what `recurrent/native.py` appends to operands.
class StateRows {
 public:
  StateRows(const ffi::Buffer<ffi::F32, 4>& state, const ffi::RemainingArgs& rows)
      : states_(state.typed_data()),
        num_slots_(state.dimensions()[0]),
        num_heads_(state.dimensions()[1]),
        size_(state.dimensions()[2] * state.dimensions()[3]),
        slots_(Numbers(rows, 0)),
        query_starts_(Numbers(rows, 1)),
        lengths_(Numbers(rows, 2)),
        num_kept_(Numbers(rows, 3)),
        draft_rows_(Numbers(rows, 4)),
        counts_(Numbers(rows, 5)),
        begins_(rows.get<ffi::Buffer<ffi::PRED, 1>>(6)->typed_data()) {}

  // Compute all rows. make() returns what computes the heads of a unit: a function of a token, a
  // head, the state before the token, which is null if it is zeros, and where the next one goes,
  // which is null if nothing needs it.
  template <typename Make>
  void Advance(ffi::ThreadPool& pool, const Make& make) const {
    const int64_t num_decodes = counts_[0], num_rows = num_decodes + counts_[1];
    const int64_t heads = std::clamp<int64_t>(kUnitElements / size_, 1, num_heads_);
    const int64_t units = (num_heads_ + heads - 1) / heads;
    Share(pool, {num_rows * units}, [&](int64_t, int64_t unit) {
      const int64_t i = unit / units, begin = unit % units * heads;
      const bool is_decode = i < num_decodes;
      const int64_t row = is_decode ? i : draft_rows_[i - num_decodes], slot = slots_[row];
      if (slot < 0 || slot >= num_slots_) return;
      auto advance = make();
      for (int64_t head = begin; head < std::min(begin + heads, num_heads_); ++head) {
        AdvanceHead(advance, head, is_decode ? i : query_starts_[row],
                    is_decode ? 1 : num_kept_[row], is_decode ? 1 : lengths_[row], begins_[row],
                    states_ + (slot * num_heads_ + head) * size_);
      }
    });
  }

 private:
  // Threads share no less than that.
  static constexpr int64_t kUnitElements = 1 << 14;

  static const int32_t* Numbers(const ffi::RemainingArgs& rows, size_t index) {
    return rows.get<ffi::Buffer<ffi::S32, 1>>(index)->typed_data();
  }

  // Compute a head of a row: `num_kept` tokens from `first` on, which the state goes on over, and
  // the rest up to `num_tokens`, which leave none.
  template <typename Advance>
  void AdvanceHead(Advance& advance, int64_t head, int64_t first, int64_t num_kept,
                   int64_t num_tokens, bool begins, float* state) const {
    const float* from = begins ? nullptr : state;
    std::unique_ptr<float[]> beside;
    for (int64_t j = 0; j < num_tokens; ++j) {
      float* to = state;
      if (j >= num_kept) {
        if (!beside && j + 1 < num_tokens) beside.reset(new float[size_]);
        to = j + 1 < num_tokens ? beside.get() : nullptr;
      }
      advance(first + j, head, from, to);
      from = to;
    }
  }

  float* states_;
  int64_t num_slots_, num_heads_, size_;
  const int32_t *slots_, *query_starts_, *lengths_, *num_kept_, *draft_rows_, *counts_;
  const bool* begins_;
};

}  // namespace jaxllm
