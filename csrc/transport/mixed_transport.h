#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "transport/shm/shm_transport.h"
#include "transport/verbs/verbs_transport.h"

namespace bls {

/// Shared memory to the ranks of this host, RDMA to all others.
///
/// The ranks of a host have a mesh of their own in shared memory, in which they are numbered from 0
/// on. Both transports are connected before.
class MixedTransport final : public Transport {
 public:
  /// `local_ranks` are the ranks of this host in ascending order, this one among them.
  MixedTransport(std::unique_ptr<ShmTransport> shm, std::unique_ptr<VerbsTransport> verbs,
                 std::span<const int> local_ranks, int world_size);
  ~MixedTransport() override;

  size_t slot_bytes() const override { return verbs_->slot_bytes(); }
  size_t ring_bytes() const override { return shm_->ring_bytes() + verbs_->ring_bytes(); }
  bool polled() const override { return true; }
  void use_interrupt(const Interrupt& interrupt) override { verbs_->use_interrupt(interrupt); }
  void progress() override;
  std::byte* inbox(int source, uint32_t slot) override;
  std::byte* outbox(int destination, uint32_t slot) override;
  void deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) override;
  void return_credit(int source, uint64_t consumed) override;
  uint64_t credit(int destination) override;
  std::byte* expose(int destination, uint32_t slot, size_t bytes, MemoryAddress& address) override;
  void retract(int destination, uint32_t slot) override;
  const std::byte* pull(int source, uint32_t slot, const MemoryAddress& address,
                        size_t bytes) override;
  void drop(int source, uint32_t slot) override;
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override;
  void wake_self() override { shm_->wake_self(); }
  const std::atomic<uint32_t>& poisoned() const override { return verbs_->poisoned(); }
  Poison poison() const override { return verbs_->poison(); }
  void poison_all(const std::string& message) override;
  void pass_poison_on() override;
  PeerState peer_state(int peer) override;
  std::string peer_fault(int peer) override;
  void announce_close() override;
  void abandon() override;

 private:
  struct Way {
    Transport* transport;
    int rank;  // of the peer, in its numbering
  };

  void watch();
  Poison poison_of_host() const;

  std::unique_ptr<ShmTransport> shm_;
  std::unique_ptr<VerbsTransport> verbs_;
  std::vector<int> local_ranks_;
  std::vector<Way> ways_;  // [peer]
  std::atomic<bool> stopping_{false};
  std::thread watcher_;
};

}  // namespace bls
