#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "transport/ring_shape.h"
#include "transport/transport.h"
#include "transport/verbs_memory.h"
#include "transport/verbs_queue.h"

namespace bls {

/// What a rank tells the others before they connect.
struct VerbsAddress {
  ibv_gid gid{};
  uint16_t lid = 0;
  uint32_t mtu = 0;            ///< bytes of a packet
  uint32_t packet_number = 0;  ///< of the first packet on each of its connections
  uint64_t memory = 0;         ///< where its inbox region starts
  uint64_t memory_bytes = 0;
  uint32_t remote_key = 0;
  std::vector<uint32_t> queue_pairs;  ///< [peer], 0 for itself
};

/// Transport between hosts: RDMA over reliable connections, with the plain verbs of libibverbs.
///
/// Each rank registers an inbox region that its peers write into: control words and slots. A
/// message is made in a registered outbox and written into the receiver's slot, all but its arrival
/// word; the notification that comes with the write makes the receiver set that word itself, so
/// that nobody believes bytes that have not arrived. docs/wire-format.md has the details,
/// docs/design/verbs.md the reasons.
class VerbsTransport final : public Transport {
 public:
  /// Opens the device and registers all memory. Peers are reachable after `connect`. `deadline`
  /// ends waits for the device.
  VerbsTransport(std::shared_ptr<Ibverbs> verbs, const VerbsConfig& config, const RingShape& shape,
                 std::chrono::milliseconds deadline);
  ~VerbsTransport() override;

  VerbsAddress address() const;
  /// Connects to all ranks (`addresses[rank]`, this rank's own included). No message may be sent
  /// before every rank has returned from it.
  void connect(std::span<const VerbsAddress> addresses);
  const VerbsDevice& device() const { return device_; }

  size_t slot_bytes() const override { return stride_; }
  size_t ring_bytes() const override;
  bool polled() const override { return true; }
  void progress() override;
  std::byte* inbox(int source, uint32_t slot) override;
  std::byte* outbox(int destination, uint32_t slot) override;
  void deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) override;
  void return_credit(int source, uint64_t consumed) override;
  uint64_t credit(int destination) override;
  std::byte* expose(int destination, uint32_t slot, size_t bytes, MemoryAddress& address) override;
  void retract(int destination, uint32_t slot) override;
  const std::byte* pull(int source, uint32_t slot, const MemoryAddress& address) override;
  void drop(int source, uint32_t slot) override;
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override;
  void wake_self() override;
  const std::atomic<uint32_t>& poisoned() const override { return poison_word(); }
  Poison poison() const override;
  void poison_all(const std::string& message) override;
  void pass_poison_on() override;
  PeerState peer_state(int peer) override;
  std::string peer_fault(int peer) override;
  void announce_close() override;

 private:
  struct PeerBlock;
  struct Fault {
    PeerState state;
    std::string text;
  };
  struct Peer {
    std::optional<VerbsQueue> queue;
    uint64_t memory = 0;
    uint32_t remote_key = 0;
    uint64_t received = 0;     // messages
    uint64_t told_credit = 0;  // of these, read
    bool reading = false;      // a message larger than a slot is being pulled
    bool heard = false;        // since `last_heard`
    Clock::time_point last_heard;
    std::optional<Fault> fault;
  };

  // All below are called with the lock held.
  void drain();
  void take(const ibv_wc& completion);
  void take_arrival(const ibv_wc& completion);
  void take_failure(const ibv_wc& completion);
  void replenish();
  void tell_credit(int peer);
  void probe_if_silent(int peer);
  void read_device_events();
  void post(int peer, std::span<ibv_send_wr> requests, uint64_t tag);
  void write_word(int peer, uint64_t remote_offset, uint64_t value);
  void lose(int peer, PeerState state, const std::string& what);
  void lose_all(const std::string& what);
  void latch_poison() const;
  void spread_poison(std::unique_lock<std::mutex>& lock);
  void flush(std::unique_lock<std::mutex>& lock, Clock::duration limit);
  template <class Done>
  bool await(std::unique_lock<std::mutex>& lock, Clock::duration limit, Done done);
  bool closed(int peer) const;

  ibv_send_wr write_request(int peer, ibv_sge& piece, uint64_t remote_offset) const;
  static uint64_t block_offset(int peer);
  static PeerBlock& block_of(std::byte* base, int peer);
  std::atomic<uint32_t>& own_poison_word() const;
  const std::atomic<uint32_t>& poison_word() const { return own_poison_word(); }
  size_t pair_index(int peer, uint32_t slot) const {
    return static_cast<size_t>(peer) * shape_.slots + slot;
  }

  RingShape shape_;
  std::chrono::milliseconds deadline_;
  size_t stride_;
  size_t ring_offset_;  // of the slots in the inbox region
  VerbsDevice device_;
  uint32_t packet_number_;
  size_t pieces_;  // requests that a message takes at most
  uint32_t receives_;
  VerbsMemory inbox_;
  VerbsMemory outbox_;
  VerbsHandle<ibv_comp_channel> events_;
  VerbsHandle<ibv_cq> completions_;
  VerbsHandle<ibv_srq> receive_queue_;
  int wake_ = -1;  // eventfd
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  std::unordered_map<uint32_t, int> peer_by_pair_;
  std::vector<ibv_send_wr> requests_;  // of the chain that is being put together
  std::vector<ibv_sge> segments_;
  std::vector<uint8_t> sending_;  // [destination][slot] the device may still read the outbox
  uint32_t used_receives_ = 0;
  mutable std::optional<Poison> poison_;
  bool poison_spread_ = false;
  std::vector<VerbsMemory> exposed_;  // [destination][slot]
  std::vector<VerbsMemory> pulled_;   // [source][slot]
};

}  // namespace bls
