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
  HeapMesh(int world_size, uint32_t slots, size_t slot_bytes)
      : slots_(slots), slot_bytes_((slot_bytes + 63) / 64 * 64) {
    for (int rank = 0; rank < world_size; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(
          world_size, static_cast<size_t>(world_size) * slots_ * slot_bytes_));
    }
  }

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
    std::atomic<uint64_t> ended{0};
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
  HeapTransport(std::shared_ptr<HeapMesh> mesh, int rank)
      : mesh_(std::move(mesh)), rank_(rank), exposed_(pair_index(mesh_->world_size(), 0)) {}

  size_t slot_bytes() const override { return mesh_->slot_bytes(); }
  size_t ring_bytes() const override {
    return pair_index(mesh_->world_size(), 0) * mesh_->slot_bytes();
  }
  std::byte* inbox(int source, uint32_t slot) override { return slot_at(rank_, source, slot); }
  std::byte* outbox(int destination, uint32_t slot) override {
    return slot_at(destination, rank_, slot);
  }
  void deliver(int destination, std::byte* slot, size_t, uint64_t sequence) override {
    arrival_word(slot).store(sequence + 1, std::memory_order_release);
    wake(destination);
  }
  void return_credit(int source, uint64_t consumed) override {
    mesh_->rank(source).credit[static_cast<size_t>(rank_)].store(consumed,
                                                                 std::memory_order_release);
  }
  uint64_t credit(int destination) override {
    return mesh_->rank(rank_).credit[static_cast<size_t>(destination)].load(
        std::memory_order_acquire);
  }
  void tell_end(uint64_t count) override { mesh_->rank(rank_).ended.store(count); }
  uint64_t ended(int peer) override { return mesh_->rank(peer).ended.load(); }
  std::byte* expose(int destination, uint32_t slot, size_t bytes, MemoryAddress& address) override {
    auto& memory = exposed_[pair_index(destination, slot)];
    if (memory.size() < bytes) memory.resize(bytes);
    address.where[0] = reinterpret_cast<uintptr_t>(memory.data());
    address.bytes = memory.size();
    return memory.data();
  }
  void retract(int destination, uint32_t slot) override {
    exposed_[pair_index(destination, slot)] = {};
  }
  const std::byte* pull(int, uint32_t, const MemoryAddress& address, size_t) override {
    return reinterpret_cast<const std::byte*>(address.where[0]);
  }
  void drop(int, uint32_t) override {}
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override {
    HeapMesh::Rank& own = mesh_->rank(rank_);
    std::unique_lock lock(own.mutex);
    if (!ready(context) && own.poisoned.load() == 0) own.wake.wait_until(lock, until);
  }
  void wake_self() override { wake(rank_); }
  const std::atomic<uint32_t>& poisoned() const override { return mesh_->rank(rank_).poisoned; }
  Poison poison() const override {
    HeapMesh::Rank& own = mesh_->rank(rank_);
    const std::lock_guard lock(own.mutex);
    return own.poison;
  }
  void poison_all(const std::string& message) override { spread({rank_, message}); }
  void pass_poison_on() override {
    if (poisoned().load() != 0) spread(poison());
  }
  PeerState peer_state(int peer) override {
    const HeapMesh::Rank& other = mesh_->rank(peer);
    if (other.closed.load()) return PeerState::kClosed;
    return other.dead.load() ? PeerState::kDead : PeerState::kOpen;
  }
  void announce_close() override {
    mesh_->rank(rank_).closed.store(true);
    for (int peer = 0; peer < mesh_->world_size(); ++peer) wake(peer);
  }

 private:
  void wake(int rank) {
    HeapMesh::Rank& other = mesh_->rank(rank);
    const std::lock_guard lock(other.mutex);
    other.wake.notify_all();
  }
  void spread(const Poison& poison) {
    for (int peer = 0; peer < mesh_->world_size(); ++peer) {
      HeapMesh::Rank& other = mesh_->rank(peer);
      {
        const std::lock_guard lock(other.mutex);
        if (other.poisoned.load() != 0) continue;
        other.poison = poison;
        other.poisoned.store(1);
      }
      wake(peer);
    }
  }
  std::byte* slot_at(int owner, int source, uint32_t slot) const {
    auto* const inbox = reinterpret_cast<std::byte*>(mesh_->rank(owner).inbox.data());
    return inbox + pair_index(source, slot) * mesh_->slot_bytes();
  }
  size_t pair_index(int peer, uint32_t slot) const {
    return static_cast<size_t>(peer) * mesh_->slots() + slot;
  }

  std::shared_ptr<HeapMesh> mesh_;
  int rank_;
  std::vector<std::vector<std::byte>> exposed_;  // [destination][slot]
};

}  // namespace bls::testing
