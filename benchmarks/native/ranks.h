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
#include <functional>
#include <vector>

namespace bench {

inline constexpr int kMaxRanks = 16;
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

// Polls briefly and then yields: the fastest policy measured, alone on a core and oversubscribed.
class Waiter {
 public:
  void wait() {
    if (++polls_ < 50) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#else
      asm volatile("yield" ::: "memory");
#endif
    } else {
      sched_yield();
    }
  }

 private:
  int polls_ = 0;
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

inline void pin_to_core(int rank) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  int skip = rank % CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || skip-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
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

// Runs body(rank) in `ranks` pinned processes; returns the exit status for main.
inline int launch(int ranks, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      pin_to_core(rank);
      body(rank);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  for (int left = ranks; left > 0; --left) {
    int status = 0;
    wait(&status);
    if (status == 0) continue;
    for (const pid_t child : children) kill(child, SIGKILL);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  }
  return 0;
}

}  // namespace bench
