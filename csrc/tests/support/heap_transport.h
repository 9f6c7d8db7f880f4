#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/transport.h"

namespace bls::testing {

/// What the ranks of a HeapTransport share.
class HeapMesh {
 public:
  HeapMesh(int world_size, uint32_t slots, size_t slot_bytes);

  struct Rank {
    explicit Rank(int world_size, size_t inbox_bytes)
        : credit(static_cast<size_t>(world_size)),
          // Slots are arrays of a type of their alignment.
          inbox(inbox_bytes / sizeof(Line)) {}

    struct alignas(64) Line {
      std::byte bytes[64];
    };
    std::vector<std::atomic<uint64_t>> credit;  // [peer]
    std::vector<Line> inbox;                    // [source][slot]
    std::atomic<bool> closed{false};
    std::atomic<bool> dead{false};
    std::atomic<uint32_t> poisoned{0};
    Poison poison;  // under the mutex
    std::mutex mutex;
    std::condition_variable wake;
  };

  Rank& rank(int index) { return *ranks_[static_cast<size_t>(index)]; }
  int world_size() const { return static_cast<int>(ranks_.size()); }
  uint32_t slots() const { return slots_; }
  size_t slot_bytes() const { return slot_bytes_; }

 private:
  uint32_t slots_;
  size_t slot_bytes_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

/// Transport between threads in ordinary memory. Unlike two mappings of one segment, both sides use
/// one address, so that a thread sanitizer sees every access to a slot that the channel does not
/// order. A rank may be declared dead.
class HeapTransport : public Transport {
 public:
  HeapTransport(std::shared_ptr<HeapMesh> mesh, int rank);

  size_t slot_bytes() const override { return mesh_->slot_bytes(); }
  size_t ring_bytes() const override {
    return pair_index(mesh_->world_size(), 0) * mesh_->slot_bytes();
  }
  std::byte* inbox(int source, uint32_t slot) override { return slot_at(rank_, source, slot); }
  std::byte* outbox(int destination, uint32_t slot) override {
    return slot_at(destination, rank_, slot);
  }
  void deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) override;
  void return_credit(int source, uint64_t consumed) override;
  uint64_t credit(int destination) override;
  std::byte* expose(int destination, uint32_t slot, size_t bytes, MemoryAddress& address) override;
  void retract(int destination, uint32_t slot) override;
  const std::byte* pull(int source, uint32_t slot, const MemoryAddress& address,
                        size_t bytes) override;
  void drop(int source, uint32_t slot) override;
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override;
  void wake_self() override { wake(rank_); }
  const std::atomic<uint32_t>& poisoned() const override { return mesh_->rank(rank_).poisoned; }
  Poison poison() const override;
  void poison_all(const std::string& message) override { spread({rank_, message}); }
  void pass_poison_on() override;
  PeerState peer_state(int peer) override;
  void announce_close() override;

 private:
  void wake(int rank);
  void spread(const Poison& poison);
  std::byte* slot_at(int owner, int source, uint32_t slot) const;
  size_t pair_index(int peer, uint32_t slot) const {
    return static_cast<size_t>(peer) * mesh_->slots() + slot;
  }

  std::shared_ptr<HeapMesh> mesh_;
  int rank_;
  std::vector<std::vector<std::byte>> exposed_;  // [destination][slot]
};

}  // namespace bls::testing
