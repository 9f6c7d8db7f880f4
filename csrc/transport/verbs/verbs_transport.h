#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "transport/network_transport.h"
#include "transport/ring_shape.h"
#include "transport/verbs/device/verbs_completions.h"
#include "transport/verbs/device/verbs_memory.h"
#include "transport/verbs/device/verbs_queue.h"
#include "transport/verbs/verbs_layout.h"

namespace bls {

/// What a rank tells the others before they connect.
struct VerbsAddress {
  ibv_gid gid{};
  uint16_t lid = 0;
  uint32_t mtu = 0;            ///< bytes of a packet that it wants at most
  uint32_t packet_number = 0;  ///< of the first packet on each of its connections
  uint64_t memory = 0;         ///< where its inbox region starts
  uint64_t memory_bytes = 0;
  uint32_t remote_key = 0;
  std::vector<uint32_t> queue_pairs;  ///< [peer], 0 for itself and for those it does not connect to
  std::vector<uint32_t> places;       ///< [peer] of its words and slots in the region
};

/// Transport between hosts: RDMA over reliable connections, with the plain verbs of libibverbs.
///
/// Each rank registers an inbox region that its peers write into: control words and slots. A
/// message is made in a registered outbox and written into the receiver's slot, all but its arrival
/// word; the notification that comes with the write makes the receiver set that word itself, so
/// that nobody believes bytes that have not arrived. docs/wire-format.md has the details,
/// docs/design/verbs.md the reasons.
class VerbsTransport final : public NetworkTransport {
 public:
  /// Opens the device and registers all memory. Peers are reachable after `connect`: `peers`, in
  /// ascending order and without this rank. `deadline` ends waits for the device.
  VerbsTransport(std::shared_ptr<Ibverbs> verbs, const VerbsConfig& config, const RingShape& shape,
                 std::chrono::milliseconds deadline, std::span<const int> peers);
  ~VerbsTransport() override;

  VerbsAddress address() const;
  /// Connects to the peers (`addresses[rank]`, those of all ranks). No message may be sent
  /// before every rank has returned from it.
  void connect(std::span<const VerbsAddress> addresses);
  const VerbsDevice& device() const { return device_; }

  void arm() override;
  void await_event(Clock::time_point until) override;
  void adopt_poison(const Poison& poison) override;

  size_t slot_bytes() const override { return layout_.stride(); }
  size_t ring_bytes() const override { return layout_.ring_bytes(); }
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
  void wake_self() override { completions_.wake(); }
  const std::atomic<uint32_t>& poisoned() const override {
    return VerbsLayout::poison_word(inbox_.data());
  }
  Poison poison() const override;
  void poison_all(const std::string& message) override;
  void pass_poison_on() override;
  PeerState peer_state(int peer) override;
  std::string peer_fault(int peer) override;
  void announce_close() override;
  void abandon() override;

 private:
  struct Fault {
    PeerState state;
    std::string text;
  };
  struct Peer {
    std::optional<VerbsQueue> queue;
    uint32_t place = 0;        // of its words and slots in this rank's regions
    uint32_t place_there = 0;  // of this rank's in the peer's inbox region
    uint64_t slots_there = 0;  // offset in that region
    uint64_t memory = 0;
    uint32_t remote_key = 0;
    uint64_t received = 0;     // messages
    uint64_t told_credit = 0;  // of these, read
    bool reading = false;      // a message larger than a slot is being pulled
    bool telling_end = false;  // the device may still send the last `tell_end`
    bool heard = false;        // since `last_heard`
    Clock::time_point last_heard;
    std::optional<Fault> fault;
  };

  // Tags of chains; a message has that of its slot, counted from kFirstSlotTag on.
  static constexpr uint64_t kControlTag = 0;
  static constexpr uint64_t kReadTag = 1;
  static constexpr uint64_t kEndTag = 2;
  static constexpr uint64_t kFirstSlotTag = 3;
  static constexpr size_t kArrivalWord = sizeof(uint64_t);
  /// How long telling others of a failure may take.
  static constexpr std::chrono::milliseconds kPoisonGrace{200};
  static constexpr const char* kKernelLog = ". Look at the kernel log (dmesg)";

  // verbs_connect.cpp
  void open_queues(std::span<const int> peers);

  // All below are called with the lock held.

  // verbs_transport.cpp
  void tell_credit(int peer);
  void post(int peer, std::span<ibv_send_wr> requests, uint64_t tag);
  void write_word(int peer, size_t offset, uint64_t value, uint64_t tag = kControlTag);
  ibv_send_wr write_request(int peer, ibv_sge& piece, uint64_t remote_offset) const;

  // verbs_arrivals.cpp
  void drain();
  void take(const ibv_wc& completion);
  void take_arrival(const ibv_wc& completion);
  void take_failure(const ibv_wc& completion);
  void read_device_events();

  // verbs_peers.cpp
  bool closed(int peer) const;
  void probe_if_silent(int peer);
  void lose(int peer, PeerState state, const std::string& what);
  void lose_all(const std::string& what);
  void flush(std::unique_lock<std::mutex>& lock, Clock::duration limit, const Interrupt& interrupt);

  // verbs_poison.cpp
  void latch_poison() const;
  void keep_poison(const Poison& poison);
  void spread_poison(std::unique_lock<std::mutex>& lock);

  /// Waits until `done()`; false after `limit`. Others may come in between.
  template <class Done>
  bool await(std::unique_lock<std::mutex>& lock, Clock::duration limit, const Interrupt& interrupt,
             Done done) {
    if (done()) return true;
    const Clock::time_point start = Clock::now();
    for (;;) {
      drain();
      if (done()) return true;
      const Clock::duration waited = Clock::now() - start;
      if (waited >= limit) return false;
      lock.unlock();
      if (interrupt && waited >= kBeforeInterrupt) interrupt();
      sched_yield();
      lock.lock();
    }
  }

  /// What `peer` wrote about itself.
  PeerBlock& block_of(int peer) const {
    return VerbsLayout::block(inbox_.data(), peers_[peer].place);
  }
  size_t pair_index(int peer, uint32_t slot) const {
    return static_cast<size_t>(peer) * shape_.slots + slot;
  }

  RingShape shape_;
  std::chrono::milliseconds deadline_;
  Interrupt interrupt_;
  VerbsLayout layout_;
  VerbsDevice device_;
  size_t pieces_;  // requests that a message takes at most
  uint32_t requests_per_peer_;
  uint32_t packet_number_;
  VerbsMemory inbox_;
  VerbsMemory outbox_;
  VerbsCompletions completions_;
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  std::unordered_map<uint32_t, int> peer_by_pair_;
  std::vector<ibv_send_wr> requests_;  // of the chain that is being put together
  std::vector<ibv_sge> segments_;
  std::vector<uint8_t> sending_;  // [destination][slot] the device may still read the outbox
  mutable std::optional<Poison> poison_;
  bool poison_spread_ = false;
  std::vector<VerbsMemory> exposed_;  // [destination][slot]
  std::vector<VerbsMemory> pulled_;   // [source][slot]
};

}  // namespace bls
