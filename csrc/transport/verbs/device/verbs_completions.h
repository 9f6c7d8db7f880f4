#pragma once

#include <array>
#include <span>

#include "transport/verbs/device/verbs_device.h"

namespace bls {

/// Tells completions of receives from those of requests, by `wr_id`.
inline constexpr uint64_t kReceiveId = ~uint64_t{0};

/// The completion queue of all connections, the receives that they share, and what a rank that
/// sleeps waits for. Neither queue can overflow: both are made for all that may be under way.
class VerbsCompletions {
 public:
  /// Receives are posted again this many at a time.
  static constexpr uint32_t kReceiveBatch = 16;

  /// `messages` and `requests`: how many may be under way to this rank and from it.
  VerbsCompletions(const VerbsDevice& device, size_t messages, size_t requests);
  ~VerbsCompletions();
  VerbsCompletions(const VerbsCompletions&) = delete;
  VerbsCompletions& operator=(const VerbsCompletions&) = delete;

  ibv_cq* queue() const { return queue_.get(); }
  ibv_srq* receives() const { return receives_.get(); }

  /// As ibv_poll_cq; counts the receives that were used.
  int poll(std::span<ibv_wc> batch);
  /// Posts used receives again, if there are enough. Returns what the device said.
  int replenish();

  /// From here on the next completion ends `await_event`.
  void arm();
  /// Waits for that, for `wake`, for an event of the device, or until `left` nanoseconds are over.
  void await_event(int64_t left);
  void wake();
  /// For a forked child: gives back its descriptors.
  void abandon() const;

 private:
  const VerbsDevice& device_;
  VerbsHandle<ibv_comp_channel> events_;
  VerbsHandle<ibv_cq> queue_;
  VerbsHandle<ibv_srq> receives_;
  uint32_t used_receives_;
  int wake_ = -1;  // eventfd
};

}  // namespace bls
