// What every native all-to-all program shares besides the measurement: options, pinning, waiting.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace bench {

inline constexpr int kMaxRanks = 16;

struct Options {
  int ranks = 2;
  std::size_t bytes = 8;
  double seconds = 0.3;         // aimed-at time of each of the two measurements
  std::size_t repetitions = 0;  // if given, one train of so many calls is all that is measured
};

inline Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (!std::strcmp(argv[i], "--ranks")) {
      options.ranks = std::atoi(value);
    } else if (!std::strcmp(argv[i], "--bytes")) {
      options.bytes = std::strtoull(value, nullptr, 10);
    } else if (!std::strcmp(argv[i], "--seconds")) {
      options.seconds = std::atof(value);
    } else if (!std::strcmp(argv[i], "--repetitions")) {
      options.repetitions = std::strtoull(value, nullptr, 10);
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      std::exit(2);
    }
    ++i;
  }
  if (options.ranks < 2 || options.ranks > kMaxRanks || options.bytes == 0 || options.bytes % 8) {
    std::fprintf(stderr, "need 2 to %d ranks and a positive multiple of 8 bytes\n", kMaxRanks);
    std::exit(2);
  }
  return options;
}

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

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield" ::: "memory");
#endif
}

// Polls briefly and then yields: the fastest policy measured, alone on a core and oversubscribed.
class Waiter {
 public:
  void wait() {
    if (++polls_ < 50) {
      pause();
    } else {
      sched_yield();
    }
  }

 private:
  int polls_ = 0;
};

}  // namespace bench
