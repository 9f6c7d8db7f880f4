#pragma once

#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace bls {

/// Lets a thread that closes an object wait until the call of another thread has left it. One
/// thread at a time is inside. To enter costs no fence: the one that this needs is in `close`.
class CallGate {
 public:
  CallGate() { syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0); }

  /// False once the gate is shut; there is nothing to leave then.
  bool enter() {
    inside_.store(true, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (!shut_.load(std::memory_order_relaxed)) [[likely]]
      return true;
    leave();
    return false;
  }
  void leave() { inside_.store(false, std::memory_order_release); }

  /// Lets the thread that may be inside do something that waits for the gate. Returns whether it
  /// was, and has to `step_in` again.
  bool step_out() { return inside_.exchange(false); }
  void step_in() { inside_.store(true); }

  bool shut() const { return shut_.load(std::memory_order_acquire); }
  /// Lets nobody in any more. Returns whether this call is the first.
  bool close() {
    if (shut_.exchange(true)) return false;
    // Makes every thread of this process see `shut_` or this thread see its `inside_`.
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // store buffers are long empty
    }
    return true;
  }
  /// After `close`: returns when nobody is inside.
  void await_leaving() const {
    while (inside_.load()) sched_yield();
  }
  /// Shuts the gate of an object that no other thread uses, without looking for one.
  void close_alone() { shut_ = true; }

 private:
  std::atomic<bool> shut_{false};
  std::atomic<bool> inside_{false};
};

}  // namespace bls
