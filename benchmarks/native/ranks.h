// The ranks of a program: processes pinned to cores, which share memory and meet at a barrier.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace bench {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxSamples = 2000;

/// Lives in memory that all ranks map; starts as zeros.
struct Shared {
  struct alignas(64) Arrived {
    std::atomic<std::uint64_t> epoch;
  };
  Arrived arrived[kMaxRanks];
  std::size_t length;                // of a sample, in calls
  std::atomic<std::size_t> stop_at;  // so many samples
  double seconds[kMaxRanks][kMaxSamples];
};

// Polls briefly and then yields: the fastest policy measured, alone on a core and oversubscribed.
template <class Ready>
void wait_until(Ready ready) {
  for (int polls = 1; !ready(); ++polls) {
    if (polls >= 50) {
      sched_yield();
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("yield" ::: "memory");
#endif
  }
}

/// One of the ranks, which share memory and meet at a barrier.
struct Rank {
  Shared& shared;
  const int index;
  const int count;
  std::uint64_t epoch = 0;

  void meet() {
    shared.arrived[index].epoch.store(++epoch, std::memory_order_release);
    for (int other = 0; other < count; ++other) {
      const auto& arrived = shared.arrived[other].epoch;
      wait_until([&] { return arrived.load(std::memory_order_acquire) >= epoch; });
    }
  }
};

inline void pin_to_core(int rank) {
  cpu_set_t cores;
  sched_getaffinity(0, sizeof cores, &cores);
  int core = 0;
  for (int skip = rank % CPU_COUNT(&cores); !CPU_ISSET(core, &cores) || skip-- > 0;) ++core;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

// Zeroed memory that the processes forked later share.
inline void* shared_memory(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(2);
  }
  return memory;
}

// Runs body(rank) in `ranks` pinned processes, which end with this one; returns main's exit status.
template <class Body>
int launch(int ranks, Body body) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pin_to_core(rank);
    body(rank);
    std::_Exit(0);
  }
  int status = 0;
  for (int left = ranks; left > 0 && status == 0; --left) wait(&status);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace bench
