#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "channel/call_gate.h"
#include "channel/channel_errors.h"
#include "channel/protocol.h"
#include "channel/waiter.h"
#include "errors.h"
#include "transport/rank_names.h"
#include "transport/transport.h"

namespace bls {

struct ChannelConfig {
  int rank = 0;
  int world_size = 1;
  uint32_t bound = 0;
  /// Slots per ordered pair; 2(bound + 1) never waits for a slot, fewer are safe and may wait.
  uint32_t slots = 2;
  std::chrono::milliseconds deadline{60000};
  std::string name = "channel";
  int local_ranks = 1;  ///< on this rank's host, it among them
  /// Ends long waits of post, wait and close, or nothing. Called by the threads that wait. It may
  /// close or poison the channel.
  Interrupt interrupt{};
  RankNames names{};                           ///< in errors
  std::string deadline_name = "the deadline";  ///< what a user changes to wait longer, in errors
};

struct ChannelStats {
  uint64_t messages = 0;                ///< sent to other ranks
  uint64_t bytes = 0;                   ///< payload sent to other ranks
  uint64_t pulled_messages = 0;         ///< of these, larger than a slot
  uint64_t largest_message = 0;         ///< bytes a slot would have needed
  std::vector<double> wait_seconds;     ///< per peer; waits within the first spin count as zero
  std::vector<uint64_t> lag_histogram;  ///< [lag] over completed (wait, peer) pairs
};

/// Bounded-lag all-to-all-v among the ranks of a transport (docs/design/channel.md).
///
/// At most bound + 1 posts may be unreleased. All ranks post the same number of messages; nothing
/// else is agreed on, sizes travel with the data. One thread at a time calls post, wait and
/// release; `close` may come from any thread.
class Channel {
 public:
  Channel(std::unique_ptr<Transport> transport, const ChannelConfig& config);
  /// Closes the channel. Who wants to know how that went, calls `close` before.
  ~Channel();

  /// Sends `messages[d]` to rank d and returns the sequence number. The memory may be reused at
  /// once, except that the parts for this rank itself stay in place where they are one contiguous
  /// block each: leave them unchanged until the release. Never waits for a peer when there are
  /// 2(bound + 1) slots.
  uint64_t post(std::span<const Message> messages);
  /// The call that the next posts belong to (call_label.h), the same on all ranks for messages of
  /// one sequence number: a rank that leaves out a post is found out at its next one, and not by
  /// what its messages hold.
  void label(uint32_t label) { label_ = label; }
  /// Waits for the messages of the oldest post that is not completed yet.
  const Arrival& wait();
  /// Whether `wait` would return or raise at once: the messages of the oldest post are there, or
  /// something is known that keeps them from coming.
  bool ready();
  /// Gives the slots of the oldest completed post back to their senders.
  void release();

  /// Tells the peers how many forwards this rank has ended (docs/design/forwards.md). Waits for
  /// nobody. Nothing once the channel is closed.
  void tell_end(uint64_t forwards);
  /// The label of a message that a peer has sent for this rank's next post, or nothing. Raises what
  /// a wait would raise, but a peer that has ended so many `forwards` may be gone.
  std::optional<uint32_t> called(uint64_t forwards);
  /// The peers that have not told the end of so many `forwards`, as far as known.
  std::vector<int> not_ended(uint64_t forwards);

  uint64_t posted() const { return posted_; }
  uint64_t completed() const { return completed_; }
  uint64_t released() const { return released_; }
  const ChannelConfig& config() const { return config_; }
  const Transport& transport() const { return *transport_; }
  ChannelStats stats() const;
  uint64_t pulled_messages() const { return stats_.pulled_messages; }

  /// Fails the channel on all ranks: they raise kPoisoned naming this rank and `reason`.
  /// Nothing once the channel is closed.
  void poison(const std::string& reason);
  /// Ends the channel for this rank: messages that peers may still pull are kept until they are
  /// read (at most the deadline). Peers that wait for more than was posted raise kPeerClosed. The
  /// channel is closed also when an Interruption comes out of it, which fails it on all ranks.
  void close();
  bool closed() const { return gate_.shut(); }
  /// For a child right after a fork, which has none of the channel's memory: every call raises
  /// kClosed from now on, and nothing of the parent's is touched.
  void abandon();

 private:
  /// Marks this rank as inside a call, which `close` from another thread has to let end.
  class CallGuard {
   public:
    explicit CallGuard(Channel& channel) : gate_(channel.gate_) {
      if (!gate_.enter()) [[unlikely]]
        channel.raise_closed();
    }
    ~CallGuard() { gate_.leave(); }
    CallGuard(const CallGuard&) = delete;
    CallGuard& operator=(const CallGuard&) = delete;

   private:
    CallGate& gate_;
  };
  /// Large messages often take turns with small ones, as ids do with their lengths. Memory is kept
  /// meanwhile: new pages cost several times the copy.
  static constexpr uint32_t kKeepPulled = 100;
  /// One slot of this rank and one peer, in both directions.
  struct PairSlot {
    std::byte* outbox;
    std::byte* inbox;
    // For messages to be pulled: through how many further ones that fit their memory is kept.
    uint32_t exposed_for = 0;
    uint32_t pulled_for = 0;
    bool exposing() const { return exposed_for == kKeepPulled; }  // the last message is such a one
  };
  /// Everything about the messages of one sequence number; used again `slots` later.
  struct Round {
    Arrival arrival;
    std::vector<PairSlot> pairs;  // [peer]
    uint32_t label = 0;
  };
  using Rounds = std::vector<Round>;
  /// When the waits of one call have to end, all together: nothing before the first, so that a call
  /// which finds everything there reads no clock.
  using End = std::optional<Clock::time_point>;

  /// A call that the caller may not make now.
  [[noreturn, gnu::cold]] void refuse(std::invalid_argument (*error)(const ChannelConfig&)) const {
    throw error(config_);
  }

  // channel_post.cpp
  [[noreturn, gnu::cold]] void refuse_post(std::span<const Message> messages) const;
  void send(int destination, const Message& message, End& end);
  size_t put_in_slot(std::byte* slot, const Message& message);
  [[gnu::noinline]] size_t put_pulled(int destination, std::byte* slot, const Message& message);
  [[gnu::noinline]] void age_exposed(int destination);
  [[gnu::noinline]] void keep_own(const Message& message, Arrival& arrival);
  std::byte* expose(int destination, size_t bytes, MemoryAddress& address);
  [[gnu::noinline]] void await_credit(int destination, End& end);

  // channel_wait.cpp
  void receive(int source, Arrival& arrival, End& end);
  [[gnu::noinline]] uint32_t receive_any(int source, View* views, size_t& parts);
  void take_credit(int source, uint32_t low_bits);
  [[gnu::noinline]] void return_credits();
  /// True once the message `sequence` of `source` stands in the slot of `round`.
  bool arrived(int source, const Round& round, uint64_t sequence) {
    const SlotSequence found = check_sequence(round.pairs[source].inbox, sequence);
    if (found == SlotSequence::kLater) [[unlikely]]
      fail_overwritten(source, round, sequence);
    return found == SlotSequence::kAwaited;
  }
  [[gnu::noinline]] void await_message(int source, End& end);
  void record_lag(int source);

  // channel_ends.cpp
  uint32_t label_of_next(int source);

  // channel_failures.cpp
  bool poisoned() const { return poisoned_.load(std::memory_order_acquire) != 0; }
  /// For waits of the call that ends at `end`.
  void check_interrupt(const End& end);
  void ask_interrupt();
  void check_running();
  void check_alive(int peer, uint64_t sequence, const char* doing);
  void check_all_alive(uint64_t sequence);
  std::vector<channel_errors::Missing> missing_peers(uint64_t sequence);
  [[noreturn, gnu::cold]] void fail_overwritten(int source, const Round& round, uint64_t sequence);
  [[noreturn, gnu::cold]] void fail_credit(int source, uint64_t credit);
  [[noreturn, gnu::cold]] void fail_other_call(int source, uint32_t theirs);
  [[noreturn]] void fail_damaged(int source, const std::exception& error);
  [[noreturn]] void fail_unread(int source, const PartLayout& layout, const std::exception& error);
  [[noreturn]] void fail_gone(int peer, PeerState state, uint64_t sequence, const char* doing);
  /// Tells all ranks, and throws.
  [[noreturn]] void fail(const ChannelError& error);
  [[noreturn]] void raise_poison();
  [[noreturn, gnu::cold]] void raise_closed() const;
  channel_errors::Place at(uint64_t sequence) const {
    return {config_, sequence, posted_ > completed_ ? posted_ - 1 - completed_ : 0};
  }

  void await_readers(const End& end);
  /// The end of the call whose waits these are; the first one sets it.
  Clock::time_point begun(End& end) const {
    if (!end) end = Clock::now() + config_.deadline;
    return *end;
  }
  uint32_t slot_of(const Round& round) const {
    return static_cast<uint32_t>(&round - rounds_.data());
  }
  Round& round_of(uint64_t sequence) { return rounds_[sequence % config_.slots]; }
  /// Kept besides the counts, because a division costs as much as everything else that a small
  /// message needs.
  void advance(Rounds::iterator& round) {
    if (++round == rounds_.end()) round = rounds_.begin();
  }

  std::unique_ptr<Transport> transport_;
  ChannelConfig config_;
  WaitPolicy policy_;
  size_t slot_bytes_;
  const bool polled_;  // the transport: see there
  const std::atomic<uint32_t>& poisoned_;
  bool credit_word_needed_;  // for releases, besides the credit in headers
  uint64_t posted_ = 0;
  uint64_t completed_ = 0;
  uint64_t released_ = 0;
  uint32_t label_ = 0;
  Rounds rounds_;                 // [slot]
  Rounds::iterator next_post_;    // of sequence posted_
  Rounds::iterator next_wait_;    // of sequence completed_
  std::vector<uint64_t> credit_;  // [destination] messages known to be read
  ChannelStats stats_;
  CallGate gate_;
  bool abandoned_ = false;
};

}  // namespace bls
