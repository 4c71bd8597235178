// The rows of the sampler: their parameters, their flags, and the tables of their slots.

#pragma once

#include <algorithm>
#include <cstdint>

namespace jaxllm {

constexpr int32_t kNoToken = -1;
// A count has 15 bits; the sign bit says that the token is in the prompt.
constexpr int32_t kMaxCount = (1 << 15) - 1;

// As in api.py.
enum Flag : int32_t {
  kRandom = 1 << 0,
  kLogitBias = 1 << 1,
  kBadWords = 1 << 2,
  kMinTokens = 1 << 3,
  kPenalties = 1 << 4,
  kLogprobs = 1 << 5,
  kMoreLogprobs = 1 << 6,
  kAllowedIds = 1 << 7,
  kGrammar = 1 << 8,
};
constexpr int32_t kAdjusts =
    kLogitBias | kBadWords | kMinTokens | kPenalties | kAllowedIds | kGrammar;

// The columns of api.py, in their order.
struct Params {
  float temperature, top_p, min_p, presence, frequency, repetition;
  int32_t top_k;
  uint32_t seed_low, seed_high;
  int32_t min_tokens, unused_flags;
};

// A table with an entry, of one row or of several, for each slot.
template <typename T>
struct Table {
  T* data;
  int64_t num_slots, width;

  // As in XLA, a slot that does not exist is the nearest that does.
  T* Of(int64_t slot) const {
    return data + std::clamp<int64_t>(slot, 0, num_slots - 1) * width;
  }
};

}  // namespace jaxllm
