#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <string>

namespace bls {

using Clock = std::chrono::steady_clock;

/// Asked again and again by waits that take longer than kBeforeInterrupt. Throws an Interruption if
/// the wait has to end. No lock is held meanwhile.
using Interrupt = std::function<void()>;
constexpr std::chrono::milliseconds kBeforeInterrupt{20};

/// What a rank that failed tells the others.
struct Poison {
  int32_t origin = -1;
  std::string message;
};

enum class PeerState {
  kOpen,
  kClosed,
  kDead,
  kFailed,  ///< the connection failed, and not by the end of the peer
};

/// Where a message stands that is larger than a slot, as it travels in the slot. Only the transport
/// understands `where`.
struct MemoryAddress {
  uint64_t where[3];
  uint64_t bytes;
};
static_assert(sizeof(MemoryAddress) == 32);

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
///
/// There are two kinds. With shared memory an outbox is the receiver's slot itself: it stays where
/// it is, and nothing has to be done for messages to come. A transport that is `polled` moves on
/// only in its calls: `outbox` has to be called for each message, since it waits until the device
/// has read what stood there, and `progress` before arrival words are looked at.
///
/// A new transport gets a folder beside shm/ and a name in tests/support/transport_under_test.cpp:
/// the tests of the protocol then run over it.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Bytes a message may take in a slot, arrival word included.
  virtual size_t slot_bytes() const = 0;
  virtual bool polled() const { return false; }
  /// Makes what waits within this transport's calls ask `interrupt`.
  virtual void use_interrupt(const Interrupt&) {}
  virtual void progress() {}
  /// Memory this rank reserved for its inbox.
  virtual size_t ring_bytes() const = 0;

  /// Slot of this rank's inbox that messages from `source` arrive in.
  virtual std::byte* inbox(int source, uint32_t slot) = 0;
  /// Where to write the next message for `destination` before `deliver` hands it over.
  virtual std::byte* outbox(int destination, uint32_t slot) = 0;
  /// Makes the first `bytes` of `slot`, an outbox, visible at `destination`, payload before arrival
  /// word.
  virtual void deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) = 0;
  /// Tells `source` that this rank has read its first `consumed` messages.
  virtual void return_credit(int source, uint64_t consumed) = 0;
  /// How many of this rank's messages `destination` has read, as far as known.
  virtual uint64_t credit(int destination) = 0;
  /// Tells all peers a number that only grows. Wakes nobody.
  virtual void tell_end(uint64_t count) = 0;
  /// The last number that `peer` has told by `tell_end`, as far as known: ask again.
  virtual uint64_t ended(int peer) = 0;

  /// Memory at this rank for a message to `destination` that is larger than a slot. It stays until
  /// `retract` or the next `expose` for the same slot.
  virtual std::byte* expose(int destination, uint32_t slot, size_t bytes,
                            MemoryAddress& address) = 0;
  virtual void retract(int destination, uint32_t slot) = 0;
  /// The memory that `source` exposed for `slot`, of which the first `bytes` hold the message. They
  /// are readable until `drop`.
  virtual const std::byte* pull(int source, uint32_t slot, const MemoryAddress& address,
                                size_t bytes) = 0;
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
  /// Whether `peer` may still read what this rank has sent. One that has closed reads no more, even
  /// if messages of its own are on their way yet.
  virtual bool still_reads(int peer) { return peer_state(peer) == PeerState::kOpen; }
  /// Why `peer` is in its state, as far as the transport knows more than the state says.
  virtual std::string peer_fault(int) { return {}; }
  /// For the blame at a deadline: whether `source` has posted message `sequence`, which is not
  /// here. May take a moment.
  virtual bool on_its_way(int, uint64_t) { return false; }
  /// Tells the peers that no further message will come from this rank. What was delivered before
  /// has left this rank when it returns, unless its receiver is gone. When an Interruption ends its
  /// wait, the peers have been told nevertheless.
  virtual void announce_close() = 0;
  /// After the announcement, when no failure can come of what peers still read: the last call that
  /// tells them anything.
  virtual void leave() {}
  /// For a child right after a fork: gives back the descriptors that it has inherited, since they
  /// would hide the end of its parent. Nothing may be called after that.
  virtual void abandon() {}
};

}  // namespace bls
