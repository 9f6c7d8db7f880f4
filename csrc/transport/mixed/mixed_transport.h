#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "transport/network_transport.h"
#include "transport/shm/shm_transport.h"

namespace bls {

/// Shared memory to the ranks of this host, a network to all others.
///
/// The ranks of a host have a mesh of their own in shared memory, in which they are numbered from 0
/// on. Both transports are connected before.
class MixedTransport final : public Transport {
 public:
  /// `local_ranks` are the ranks of this host in ascending order, this one among them.
  MixedTransport(std::unique_ptr<ShmTransport> shm, std::unique_ptr<NetworkTransport> network,
                 std::span<const int> local_ranks, int world_size);
  ~MixedTransport() override;

  size_t slot_bytes() const override { return network_->slot_bytes(); }
  size_t ring_bytes() const override { return shm_->ring_bytes() + network_->ring_bytes(); }
  bool polled() const override { return true; }
  void use_interrupt(const Interrupt& interrupt) override { network_->use_interrupt(interrupt); }
  void progress() override;
  std::byte* inbox(int source, uint32_t slot) override {
    return of_peer(source, &Transport::inbox, slot);
  }
  std::byte* outbox(int destination, uint32_t slot) override {
    return of_peer(destination, &Transport::outbox, slot);
  }
  void deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) override {
    of_peer(destination, &Transport::deliver, slot, bytes, sequence);
  }
  void return_credit(int source, uint64_t consumed) override {
    of_peer(source, &Transport::return_credit, consumed);
  }
  uint64_t credit(int destination) override { return of_peer(destination, &Transport::credit); }
  void tell_end(uint64_t count) override {
    shm_->tell_end(count);
    network_->tell_end(count);
  }
  uint64_t ended(int peer) override { return of_peer(peer, &Transport::ended); }
  std::byte* expose(int destination, uint32_t slot, size_t bytes, MemoryAddress& address) override {
    return of_peer(destination, &Transport::expose, slot, bytes, address);
  }
  void retract(int destination, uint32_t slot) override {
    of_peer(destination, &Transport::retract, slot);
  }
  const std::byte* pull(int source, uint32_t slot, const MemoryAddress& address,
                        size_t bytes) override {
    return of_peer(source, &Transport::pull, slot, address, bytes);
  }
  void drop(int source, uint32_t slot) override { of_peer(source, &Transport::drop, slot); }
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override;
  void wake_self() override { shm_->wake_self(); }
  const std::atomic<uint32_t>& poisoned() const override { return network_->poisoned(); }
  Poison poison() const override { return network_->poison(); }
  void poison_all(const std::string& message) override;
  void pass_poison_on() override;
  PeerState peer_state(int peer) override { return of_peer(peer, &Transport::peer_state); }
  bool still_reads(int peer) override { return of_peer(peer, &Transport::still_reads); }
  bool on_its_way(int peer, uint64_t sequence) override {
    return of_peer(peer, &Transport::on_its_way, sequence);
  }
  std::string peer_fault(int peer) override { return of_peer(peer, &Transport::peer_fault); }
  void announce_close() override;
  void abandon() override;

 private:
  struct Way {
    Transport* transport;
    int rank;  // of the peer, in its numbering
  };

  /// A call of the transport that reaches `peer`, by its number there.
  template <class Result, class... Parameters, class... Arguments>
  Result of_peer(int peer, Result (Transport::*call)(int, Parameters...),
                 Arguments&&... arguments) {
    const Way& way = ways_[static_cast<size_t>(peer)];
    return (way.transport->*call)(way.rank, arguments...);
  }
  void watch();
  Poison poison_of_host() const;

  std::unique_ptr<ShmTransport> shm_;
  std::unique_ptr<NetworkTransport> network_;
  std::vector<int> local_ranks_;
  std::vector<Way> ways_;  // [peer]
  std::atomic<bool> stopping_{false};
  std::thread watcher_;
};

}  // namespace bls
