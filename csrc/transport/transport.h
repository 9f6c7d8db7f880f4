#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

#include "transport/shm_segment.h"

namespace bls {

using Clock = std::chrono::steady_clock;

/// What a rank that failed tells the others.
struct Poison {
  int32_t origin = -1;
  std::string message;
};

enum class PeerState { kOpen, kClosed, kDead };

/// First eight bytes of a slot: the sequence number of the message in it plus one, zero before the
/// first.
inline std::atomic<uint64_t>& arrival_word(std::byte* slot) {
  return *std::launder(reinterpret_cast<std::atomic<uint64_t>*>(slot));
}
static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// Moves messages between the slots of a full mesh of ranks, ordered per pair. It knows slots and
/// sequence numbers and nothing of what the messages hold; the protocol lives in channel/.
///
/// Each rank owns an inbox of `slots` slots per source and polls their arrival words in place.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Bytes a message may take in a slot, arrival word included.
  virtual size_t slot_bytes() const = 0;
  /// Memory this rank reserved for its inbox.
  virtual size_t ring_bytes() const = 0;

  /// Slot of this rank's inbox that messages from `source` arrive in.
  virtual std::byte* inbox(int source, uint32_t slot) = 0;
  /// Where to write the next message for `destination` before `deliver` hands it over.
  virtual std::byte* outbox(int destination, uint32_t slot) = 0;
  /// Makes the message in `slot`, an outbox, visible at `destination`, payload before arrival word.
  virtual void deliver(int destination, std::byte* slot, uint64_t sequence) = 0;
  /// Tells `source` that this rank has read its first `consumed` messages.
  virtual void return_credit(int source, uint64_t consumed) = 0;
  /// How many of this rank's messages `destination` has read, as far as known.
  virtual uint64_t credit(int destination) = 0;

  /// Memory at this rank for a message to `destination` that is larger than a slot. It stays until
  /// `retract` or the next `expose` for the same slot.
  virtual std::byte* expose(int destination, uint32_t slot, size_t bytes,
                            SegmentAddress& address) = 0;
  virtual void retract(int destination, uint32_t slot) = 0;
  /// The memory that `source` exposed for `slot`, readable until `drop`.
  virtual const std::byte* pull(int source, uint32_t slot, const SegmentAddress& address) = 0;
  virtual void drop(int source, uint32_t slot) = 0;

  /// Sleeps until something may have changed for this rank, or `until`.
  /// `ready` is asked once more after this rank has announced its sleep.
  virtual void sleep(bool (*ready)(void*), void* context, Clock::time_point until) = 0;
  /// Ends a sleep of this rank from another thread.
  virtual void wake_self() = 0;

  /// Not zero as soon as any rank has called `poison_all`. Stays where it is, so that looking at it
  /// before every message costs a load.
  virtual const std::atomic<uint32_t>& poisoned() const = 0;
  virtual Poison poison() const = 0;
  /// Fails the channel on every rank. Only the first poison a rank receives is kept.
  virtual void poison_all(const std::string& message) = 0;
  /// Tells every rank of the poison that this rank has received, if any: the one that failed may
  /// have ended before it could.
  virtual void pass_poison_on() = 0;

  virtual PeerState peer_state(int peer) = 0;
  /// Tells the peers that no further message will come from this rank.
  virtual void announce_close() = 0;
};

}  // namespace bls
