#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "transport/transport.h"
#include "transport/two_sided/two_sided_inbox.h"

namespace bls {

/// Carries what a two-sided transport is given. No call but `pull`, `spread_poison` and `close`
/// waits for a peer.
class Messenger {
 public:
  virtual ~Messenger() = default;

  /// Starts the exchange of all slots of a round: the outboxes here become the inboxes there, from
  /// which `bytes[peer]` are to be read. Nothing is for this rank itself.
  virtual void exchange(uint32_t slot, uint64_t sequence, std::span<const size_t> bytes) = 0;
  /// Memory for a message larger than a slot, which leaves with the next exchange of `slot`.
  virtual std::byte* expose(int destination, uint32_t slot, size_t bytes) = 0;
  virtual void retract(int destination, uint32_t slot) = 0;
  /// Waits for what `source` exposed. Raises kTimeout or kTransport.
  virtual const std::byte* pull(int source, uint32_t slot, size_t bytes) = 0;
  virtual void drop(int source, uint32_t slot) = 0;
  virtual void return_credit(int source, uint64_t consumed) = 0;
  /// Has `peer` say how many messages it has posted.
  virtual void ask(int peer) = 0;
  /// Has `peer` tell its end, see Transport::ended.
  virtual void ask_for_end(int peer) = 0;
  virtual void spread_poison(int origin, const std::string& message) = 0;
  /// Tells all peers this rank's end, and that it posted `posted` messages and is done. Returns
  /// when these have left.
  virtual void close(uint64_t posted) = 0;
  /// Tells all peers that nothing more will be told.
  virtual void leave() = 0;
};

/// A transport over collectives and messages that both sides take part in: what a messenger moves
/// arrives in a TwoSidedInbox. All messages with one number make one exchange.
class TwoSidedTransport final : public Transport {
 public:
  TwoSidedTransport(std::unique_ptr<Messenger> messenger, std::shared_ptr<TwoSidedInbox> inbox,
                    const Slots& outboxes)
      : messenger_(std::move(messenger)),
        inbox_(std::move(inbox)),
        outboxes_(outboxes),
        bytes_(static_cast<size_t>(outboxes.shape.world_size)),
        ask_again_(bytes_.size()) {}

  size_t slot_bytes() const override { return outboxes_.shape.slot_bytes; }
  size_t ring_bytes() const override { return inbox_->slots().bytes(); }
  std::byte* inbox(int source, uint32_t slot) override {
    return inbox_->slots().slot(source, slot);
  }
  std::byte* outbox(int destination, uint32_t slot) override {
    return outboxes_.slot(destination, slot);
  }
  void deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) override;
  void return_credit(int source, uint64_t consumed) override;
  uint64_t credit(int destination) override { return inbox_->read_by(destination); }
  /// Tells nobody: a peer that needs it asks, and the thread that hears it answers.
  void tell_end(uint64_t count) override { inbox_->tell_end(count); }
  uint64_t ended(int peer) override;
  std::byte* expose(int destination, uint32_t slot, size_t bytes, MemoryAddress& address) override;
  void retract(int destination, uint32_t slot) override { messenger_->retract(destination, slot); }
  const std::byte* pull(int source, uint32_t slot, const MemoryAddress& address,
                        size_t bytes) override;
  void drop(int source, uint32_t slot) override { messenger_->drop(source, slot); }
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override {
    inbox_->sleep(ready, context, until);
  }
  void wake_self() override { inbox_->wake(); }
  const std::atomic<uint32_t>& poisoned() const override { return inbox_->poisoned(); }
  Poison poison() const override { return inbox_->kept_poison(); }
  void poison_all(const std::string& message) override;
  void pass_poison_on() override;
  PeerState peer_state(int peer) override { return inbox_->state_of(peer); }
  bool still_reads(int peer) override { return inbox_->still_reads(peer); }
  std::string peer_fault(int peer) override { return inbox_->fault_of(peer); }
  bool on_its_way(int source, uint64_t sequence) override;
  void announce_close() override { messenger_->close(posted_); }
  void leave() override { messenger_->leave(); }

 private:
  std::unique_ptr<Messenger> messenger_;
  std::shared_ptr<TwoSidedInbox> inbox_;
  Slots outboxes_;
  int delivered_ = 0;          // messages of the round to be exchanged next
  std::vector<size_t> bytes_;  // of these, by destination
  uint64_t posted_ = 0;
  std::atomic<bool> poison_spread_{false};
  uint64_t asked_for_ = 0;  // sequence number plus one
  Clock::time_point answers_until_;
  std::vector<Clock::time_point> ask_again_;  // for the end, [peer]
};

}  // namespace bls
