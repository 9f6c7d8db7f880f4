// What the ranks of a measurement share: a barrier and their results.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "platform.h"

namespace bench {

inline constexpr int kMaxSamples = 2000;

/// Lives in memory that all ranks map; starts as zeros.
struct Shared {
  struct alignas(64) Arrived {
    std::atomic<std::uint64_t> epoch;
  };
  Arrived arrived[kMaxRanks];
  double estimate;
  std::atomic<std::size_t> stop_at;
  double seconds[kMaxRanks][kMaxSamples];
};

class Barrier {
 public:
  Barrier(Shared& shared, int rank, int ranks) : shared_(shared), rank_(rank), ranks_(ranks) {}

  void operator()() {
    const std::uint64_t epoch = ++epoch_;
    shared_.arrived[rank_].epoch.store(epoch, std::memory_order_release);
    for (int other = 0; other < ranks_; ++other) {
      Waiter waiter;
      while (shared_.arrived[other].epoch.load(std::memory_order_acquire) < epoch) waiter.wait();
    }
  }

 private:
  Shared& shared_;
  const int rank_;
  const int ranks_;
  std::uint64_t epoch_ = 0;
};

}  // namespace bench
