// Shares work among the threads of XLA's pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxllm {

// Call work(unit) for all units, and return when all have ended. Units before the barrier end
// before units after it begin.
//
// Each thread takes the next unit until none is left. The caller takes units, too, so it never
// waits for a thread that has not begun. A thread that begins after the end finds no unit and
// touches nothing. Units are taken in order, so a thread waits at the barrier only for running
// threads.
template <typename Work>
void Share(xla::ffi::ThreadPool& pool, int64_t num_units, int64_t barrier, const Work& work) {
  struct Units {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto units = std::make_shared<Units>();
  auto wait_for = [](const Units& units, int64_t number) {
    while (units.done.load(std::memory_order_acquire) < number) std::this_thread::yield();
  };
  auto take = [units, wait_for, num_units, barrier, &work] {
    for (int64_t unit; (unit = units->next.fetch_add(1)) < num_units;) {
      if (unit >= barrier) wait_for(*units, barrier);
      work(unit);
      units->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t num_helpers = std::min(pool.num_threads(), num_units) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule(decltype(take)(take));
  take();
  wait_for(*units, num_units);
}

}  // namespace jaxllm
