#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "transport/ring_shape.h"
#include "transport/transport.h"

namespace bls {

/// The slots of a rank in one piece of memory: world_size of each round, the rounds in order. A
/// round has those of the peers in their order, and one behind them for the rank itself.
struct Slots {
  RingShape shape;
  std::byte* memory;

  std::byte* slot(int peer, uint32_t round) const {
    const int place = peer == shape.rank ? shape.world_size - 1 : peer - (peer > shape.rank);
    const auto world_size = static_cast<size_t>(shape.world_size);
    return memory + (round * world_size + static_cast<size_t>(place)) * shape.slot_bytes;
  }
  size_t bytes() const {
    return shape.slots * static_cast<size_t>(shape.world_size) * shape.slot_bytes;
  }
};

/// Everything that the peers of a two-sided transport have told this rank: messages and news.
///
/// Threads that receive fill it, the thread that uses the channel reads it and is woken by it.
class TwoSidedInbox {
 public:
  /// The memory holds zeros.
  explicit TwoSidedInbox(const Slots& slots);

  const Slots& slots() const { return slots_; }

  // Told by the receiving threads.

  /// Message `sequence` of `peer` stands in its slot, whole. Comes in order for each peer.
  void arrived(int peer, uint64_t sequence);
  /// `peer` has posted so many messages.
  void posted(int peer, uint64_t count);
  /// `peer` has read so many of this rank's messages.
  void read(int peer, uint64_t count);
  /// `peer` has told so large an end; it answers what it was asked.
  void ended(int peer, uint64_t count);
  /// `peer` has closed after so many messages.
  void closed(int peer, uint64_t count);
  void lost(int peer, PeerState state, const std::string& fault);
  /// Nothing can be exchanged any more, for a reason that may be a lost peer or not.
  void failed(const std::string& fault);
  /// Returns whether it is the first poison, which is the one that is kept.
  bool poison(int origin, const std::string& message);
  void wake();

  // Told by this rank, for its peers.

  void tell_end(uint64_t count) { told_end_.store(count); }
  uint64_t told_end() const { return told_end_.load(); }

  // Asked by the transport.

  const std::atomic<uint32_t>& poisoned() const { return poisoned_; }
  Poison kept_poison() const;
  PeerState state_of(int peer) const;
  /// See Transport.
  bool still_reads(int peer) const;
  std::string fault_of(int peer) const;
  uint64_t read_by(int peer) const;
  uint64_t ended_by(int peer) const;
  /// Whether `peer` is known to have posted message `sequence`, by `until` at the latest.
  bool has_posted(int peer, uint64_t sequence, Clock::time_point until) const;
  /// Returns when something has been told since `ready` was asked, or at `until`.
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until);

 private:
  struct Peer {
    uint64_t arrived = 0;  // messages
    uint64_t posted = 0;
    uint64_t read = 0;
    uint64_t ended = 0;
    bool closed = false;
    PeerState lost = PeerState::kOpen;
    std::string fault;
  };
  template <class Change>
  void note(Change change);

  const Slots slots_;
  std::atomic<uint32_t> poisoned_{0};
  std::atomic<uint64_t> told_end_{0};
  mutable std::mutex mutex_;  // of everything below
  mutable std::condition_variable changed_;
  uint64_t changes_ = 0;
  std::vector<Peer> peers_;
  Poison poison_;
  std::string failure_;
  Clock::time_point failed_at_;
};

}  // namespace bls
