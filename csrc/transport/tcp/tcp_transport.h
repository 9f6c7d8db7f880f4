#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "host/memory_file.h"
#include "host/zeroed_pages.h"
#include "transport/network_transport.h"
#include "transport/ring_shape.h"
#include "transport/tcp/background.h"
#include "transport/tcp/frames.h"

namespace bls {

/// Transport over one stream connection for each pair of ranks. docs/design/tcp.md has the reasons.
///
/// A rank moves data in its own calls. While it makes none, what the kernel had no room for leaves
/// in the background, and what it can't keep comes so. No call but `pull`, `poison_all` and
/// `announce_close` waits for a peer.
class TcpTransport final : public NetworkTransport, private Background::Owner {
 public:
  /// `sockets[rank]` is connected to each peer, none for this rank itself and those that it does
  /// not talk to. `deadline` ends waits for peers; one whose host answers nothing for so long is
  /// lost.
  TcpTransport(std::vector<Descriptor> sockets, const RingShape& shape,
               std::chrono::milliseconds deadline);
  ~TcpTransport() override;

  void arm() override;
  void await_event(Clock::time_point until) override;
  void adopt_poison(const Poison& poison) override;

  size_t slot_bytes() const override { return stride_; }
  size_t ring_bytes() const override { return ring_bytes_; }
  bool polled() const override { return true; }
  void use_interrupt(const Interrupt& interrupt) override { interrupt_ = interrupt; }
  void progress() override;
  std::byte* inbox(int source, uint32_t slot) override;
  std::byte* outbox(int destination, uint32_t slot) override;
  void deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) override;
  void return_credit(int source, uint64_t consumed) override;
  uint64_t credit(int destination) override;
  void tell_end(uint64_t count) override;
  uint64_t ended(int peer) override;
  std::byte* expose(int destination, uint32_t slot, size_t bytes, MemoryAddress& address) override;
  void retract(int destination, uint32_t slot) override;
  const std::byte* pull(int source, uint32_t slot, const MemoryAddress& address,
                        size_t bytes) override;
  void drop(int source, uint32_t slot) override;
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override;
  void wake_self() override;
  const std::atomic<uint32_t>& poisoned() const override { return poisoned_; }
  Poison poison() const override;
  void poison_all(const std::string& message) override;
  void pass_poison_on() override;
  PeerState peer_state(int peer) override;
  bool still_reads(int peer) override;
  std::string peer_fault(int peer) override;
  bool on_its_way(int source, uint64_t sequence) override;
  void announce_close() override;
  void leave() override;
  void abandon() override;

 private:
  struct Fault {
    PeerState state;
    std::string text;
  };
  /// Bytes of a message outside of its slot.
  struct Large {
    ZeroedPages memory;
    size_t bytes = 0;      // of the message; 0: none
    size_t there = 0;      // of these, at a receiver
    bool is_next = false;  // at a sender: it leaves with the next message of its slot

    /// Makes room for a message, in the memory of an earlier one if that is enough.
    void hold(size_t message_bytes);
    bool is_whole() const { return bytes != 0 && there == bytes; }
  };
  struct Peer final : FrameSink {
    Peer(TcpTransport& of, int rank, Descriptor socket);
    std::byte* place(const FrameHead& head) override;
    void complete(const FrameHead& head) override;

    TcpTransport& transport;
    const int rank;
    Descriptor socket;  // none once the connection has ended
    FrameReader reader;
    FrameWriter writer;
    uint64_t posted = 0;  // messages; fewer than to another one if `close` ended the post
    uint64_t received = 0;
    uint64_t credit = 0;
    uint64_t ended = 0;
    std::optional<uint64_t> closed;  // after so many messages
    char poison_text[kMostPoison];
    int write_error = 0;  // after which this rank can tell it nothing
    std::optional<Fault> fault;
    size_t most_bytes = 0;  // of a message that came; with each it is halved, unless that has more
    bool lacks_room = false;     // for what is to be sent
    bool awaits_room = false;    // with the rank's own events
    std::vector<Large> exposed;  // [slot]
    std::vector<Large> pulled;   // [slot]
  };

  bool look() override;
  void go_on(int peer) override;
  void watch(const Descriptor& of, uint64_t name);

  // All below are called with the lock held.

  void take_events();
  void read(Peer& peer);
  bool read_once(Peer& peer);
  void write(Peer& peer);
  void send(Peer& peer);
  void await_room(Peer& peer);
  void go_on_later(Peer& peer);
  void begin_looks();
  void called();
  void lose(Peer& peer, PeerState state, const std::string& what);
  void lose_by_errno(Peer& peer, int error);
  void hang_up(Peer& peer);
  void end(Peer& peer);
  void keep_poison(const Poison& poison);
  void spread_poison(std::unique_lock<std::mutex>& lock);
  bool all_have_left() const;
  bool all_have_come() const;
  void sleep_for_events(Clock::time_point until);

  /// Waits until `done()`; false after `limit`. Others may come in between.
  template <class Done>
  bool await(std::unique_lock<std::mutex>& lock, Clock::duration limit, const Interrupt& interrupt,
             Done done);

  Peer& of(int peer) { return *peers_[static_cast<size_t>(peer)]; }
  uint32_t slot_at(uint64_t sequence) const {
    return static_cast<uint32_t>(sequence % shape_.slots);
  }
  std::byte* slot_in(const ZeroedPages& memory, int peer, uint32_t slot) const {
    const size_t place = places_[static_cast<size_t>(peer)];
    return memory.get() + (place * shape_.slots + slot) * stride_;
  }

  RingShape shape_;
  std::chrono::milliseconds deadline_;
  size_t stride_;
  std::vector<size_t> places_;  // [peer] of its slots; those without a connection share the first
  size_t ring_bytes_;
  Interrupt interrupt_;
  ZeroedPages inbox_;
  ZeroedPages outbox_;
  Descriptor epoll_;
  Descriptor wake_;
  Background& background_;
  uint64_t background_number_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;  // [rank]
  std::atomic<int> sleepers_{0};              // who take events when one comes
  uint64_t calls_ = 0;                        // of this rank, that send or look for what has come
  uint64_t calls_seen_ = 0;                   // at the last look from the background
  bool computing_ = false;             // since it posted; whoever looks for what has come reads it
  bool is_looked_at_ = false;          // from the background
  bool is_away_ = false;               // the background goes on until the next call
  std::atomic<uint32_t> poisoned_{0};  // the rank that failed first + 1
  std::string poison_text_;
  bool poison_spread_ = false;
  std::mutex arming_;
  std::condition_variable armed_or_woken_;
  bool armed_ = false;  // with `arming_`
};

}  // namespace bls
