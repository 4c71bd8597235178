// Shares work among the threads of XLA's pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <thread>
#include <vector>

#include "native/ffi.h"

namespace jaxllm {

// Call work(phase, unit) for all units of all phases, and return when all have ended. `phases` has
// the number of units of each. Units of a phase end before those of the next one begin.
//
// Each thread takes the next unit until none is left. The caller takes units, too, so it never
// waits for a thread that has not begun. A thread that begins after the end finds no unit and
// touches nothing. Units are taken in order, so a thread waits for a phase only for running threads.
template <typename Work>
void Share(ffi::ThreadPool& pool, std::initializer_list<int64_t> phases, const Work& work) {
  struct Units {
    std::atomic<int64_t> next{0}, done{0};
    std::vector<int64_t> phases;
    int64_t number = 0;
  };
  auto units = std::make_shared<Units>();
  units->phases = phases;
  for (int64_t size : phases) units->number += size;
  auto wait_for = [](const Units& units, int64_t number) {
    while (units.done.load(std::memory_order_acquire) < number) std::this_thread::yield();
  };
  auto take = [units, wait_for, &work] {
    for (int64_t unit; (unit = units->next.fetch_add(1)) < units->number;) {
      int64_t phase = 0, begin = 0;
      while (unit >= begin + units->phases[phase]) begin += units->phases[phase++];
      wait_for(*units, begin);
      work(phase, unit - begin);
      units->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t num_helpers = std::min(pool.num_threads(), units->number) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule(take);
  take();
  wait_for(*units, units->number);
}

}  // namespace jaxllm
