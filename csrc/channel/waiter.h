#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "transport/transport.h"

namespace bls {

/// How a rank waits: a short spin (the peer is running and about to write), then yielding the core
/// (the peer is runnable but has no core), then sleeping until a peer wakes it (the peer is busy or
/// late). See docs/design/channel.md for the measurements behind the numbers.
struct WaitPolicy {
  /// Beyond the first `kPolls`; zero where the peer may need this very core.
  std::chrono::microseconds spin_for{50};
  std::chrono::microseconds yield_for{200};

  /// Between two looks at the clock.
  static constexpr int kPolls = 50;
};

/// For one of `local_ranks` ranks of a host that have this many CPUs' time.
inline WaitPolicy policy_for(int local_ranks, double cpus) {
  WaitPolicy policy;
  if (local_ranks > cpus) policy.spin_for = {};
  return policy;
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Ready>
bool poll(Ready ready) {
  for (int i = 0; i < WaitPolicy::kPolls; ++i) {
    cpu_relax();
    if (ready()) return true;
  }
  return false;
}

/// Not inline, so that it costs those nothing whose message is there soon.
template <class Ready>
[[gnu::noinline]] bool poll_for(std::chrono::microseconds time, Ready ready) {
  const Clock::time_point end = Clock::now() + time;
  while (!poll(ready)) {
    if (Clock::now() >= end) return false;
  }
  return true;
}

/// The first part of a wait, for a `ready()` that has just been false. Returns whether it is true.
template <class Ready>
bool spin_until(const WaitPolicy& policy, Ready ready) {
  return poll(ready) || (policy.spin_for.count() > 0 && poll_for(policy.spin_for, ready));
}

/// The rest of a wait. `check(slow)` runs between polls and throws when waiting on is pointless;
/// `slow` says that there is time for system calls. `slice` is how long to sleep at most before
/// looking again on one's own. `elapsed` receives the time spent. Returns false at the end.
template <class Ready, class Check>
bool wait_until(Transport& transport, const WaitPolicy& policy, Clock::time_point end,
                Clock::duration slice, Clock::duration& elapsed, Ready ready, Check check) {
  const Clock::time_point start = Clock::now();
  const Clock::time_point yield_end = start + policy.yield_for;
  bool slow = false;
  for (;;) {
    check(slow);
    const bool done = ready();
    const Clock::time_point now = Clock::now();
    elapsed = now - start;
    if (done || now >= end) return done;
    slow = now >= yield_end;
    if (!slow) {
      sched_yield();
      continue;
    }
    transport.sleep([](void* context) { return (*static_cast<Ready*>(context))(); }, &ready,
                    std::min(now + slice, end));
  }
}

}  // namespace bls
