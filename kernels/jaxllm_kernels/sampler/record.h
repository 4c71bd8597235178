// Counts sampled tokens in the tables of their slots, in place.

#pragma once

#include <algorithm>
#include <cstdint>

#include "native/ffi.h"
#include "sampler/rows.h"

namespace {

using namespace jaxllm;

void Count(int32_t token, int64_t vocab_size, int16_t* counts, int32_t* rounds,
           int64_t num_rounds) {
  if (token < 0 || token >= vocab_size) return;
  const int32_t count = counts[token];
  if (num_rounds == 0 || (count & kMaxCount) != kMaxCount) {
    counts[token] = count + 1;
    return;
  }
  counts[token] = count - kMaxCount;
  for (int64_t i = 0; i < num_rounds; ++i)
    if (rounds[i] == kNoToken) {
      rounds[i] = token;
      return;
    }
}

template <typename T>
void Keep(const T* from, T* to, size_t size) {
  if (from != to) std::copy_n(from, size, to);
}

ffi::Error Record(ffi::Buffer<ffi::S16, 2> counts, ffi::Buffer<ffi::S32, 2> rounds,
                  ffi::Buffer<ffi::S32, 2> recent, ffi::Buffer<ffi::S32, 2> tokens,
                  ffi::Buffer<ffi::S32, 1> num_tokens, ffi::Buffer<ffi::S32, 1> flags,
                  ffi::Buffer<ffi::S32, 1> slots, ffi::ResultBuffer<ffi::S16, 2> new_counts,
                  ffi::ResultBuffer<ffi::S32, 2> new_rounds,
                  ffi::ResultBuffer<ffi::S32, 2> new_recent) {
  // With aliases, which the caller declares, these are the same memory.
  Keep(counts.typed_data(), new_counts->typed_data(), counts.element_count());
  Keep(rounds.typed_data(), new_rounds->typed_data(), rounds.element_count());
  Keep(recent.typed_data(), new_recent->typed_data(), recent.element_count());
  const int64_t num_slots = counts.dimensions()[0], vocab_size = counts.dimensions()[1];
  const int64_t num_rounds = rounds.dimensions()[1], num_recent = recent.dimensions()[1];
  const int64_t most = tokens.dimensions()[1];
  for (int64_t row = 0; row < (int64_t)tokens.dimensions()[0]; ++row) {
    const int32_t flag = flags.typed_data()[row], slot = slots.typed_data()[row];
    if (slot < 0 || slot >= num_slots) continue;
    const int64_t number = std::min<int64_t>(num_tokens.typed_data()[row], most);
    for (int64_t i = 0; i < number; ++i) {
      const int32_t token = tokens.typed_data()[row * most + i];
      if (flag & kPenalties)
        Count(token, vocab_size, new_counts->typed_data() + slot * vocab_size,
              new_rounds->typed_data() + slot * num_rounds, num_rounds);
      if (flag & kBadWords && num_recent > 0) {
        int32_t* its = new_recent->typed_data() + slot * num_recent;
        std::copy(its + 1, its + num_recent, its);
        its[num_recent - 1] = token;
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace
