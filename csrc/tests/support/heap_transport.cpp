#include "tests/support/heap_transport.h"

namespace bls::testing {
namespace {

size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

HeapMesh::HeapMesh(int world_size, uint32_t slots, size_t slot_bytes)
    : slots_(slots), slot_bytes_(whole_lines(slot_bytes)) {
  for (int rank = 0; rank < world_size; ++rank) {
    ranks_.push_back(
        std::make_unique<Rank>(world_size, static_cast<size_t>(world_size) * slots_ * slot_bytes_));
  }
}

HeapTransport::HeapTransport(std::shared_ptr<HeapMesh> mesh, int rank)
    : mesh_(std::move(mesh)), rank_(rank), exposed_(pair_index(mesh_->world_size(), 0)) {}

std::byte* HeapTransport::slot_at(int owner, int source, uint32_t slot) const {
  auto* const inbox = reinterpret_cast<std::byte*>(mesh_->rank(owner).inbox.data());
  return inbox + pair_index(source, slot) * mesh_->slot_bytes();
}

void HeapTransport::deliver(int destination, std::byte* slot, size_t, uint64_t sequence) {
  arrival_word(slot).store(sequence + 1, std::memory_order_release);
  wake(destination);
}

void HeapTransport::return_credit(int source, uint64_t consumed) {
  mesh_->rank(source).credit[static_cast<size_t>(rank_)].store(consumed, std::memory_order_release);
}

uint64_t HeapTransport::credit(int destination) {
  return mesh_->rank(rank_).credit[static_cast<size_t>(destination)].load(
      std::memory_order_acquire);
}

std::byte* HeapTransport::expose(int destination, uint32_t slot, size_t bytes,
                                 MemoryAddress& address) {
  auto& memory = exposed_[pair_index(destination, slot)];
  if (memory.size() < bytes) memory.resize(bytes);
  address.where[0] = reinterpret_cast<uintptr_t>(memory.data());
  address.bytes = memory.size();
  return memory.data();
}

void HeapTransport::retract(int destination, uint32_t slot) {
  exposed_[pair_index(destination, slot)] = {};
}

const std::byte* HeapTransport::pull(int, uint32_t, const MemoryAddress& address, size_t) {
  return reinterpret_cast<const std::byte*>(address.where[0]);
}

void HeapTransport::drop(int, uint32_t) {}

void HeapTransport::sleep(bool (*ready)(void*), void* context, Clock::time_point until) {
  HeapMesh::Rank& own = mesh_->rank(rank_);
  std::unique_lock lock(own.mutex);
  if (!ready(context) && own.poisoned.load() == 0) own.wake.wait_until(lock, until);
}

void HeapTransport::wake(int rank) {
  HeapMesh::Rank& other = mesh_->rank(rank);
  const std::lock_guard lock(other.mutex);
  other.wake.notify_all();
}

Poison HeapTransport::poison() const {
  HeapMesh::Rank& own = mesh_->rank(rank_);
  const std::lock_guard lock(own.mutex);
  return own.poison;
}

void HeapTransport::pass_poison_on() {
  if (poisoned().load() != 0) spread(poison());
}

void HeapTransport::spread(const Poison& poison) {
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

PeerState HeapTransport::peer_state(int peer) {
  const HeapMesh::Rank& other = mesh_->rank(peer);
  if (other.closed.load()) return PeerState::kClosed;
  return other.dead.load() ? PeerState::kDead : PeerState::kOpen;
}

void HeapTransport::announce_close() {
  mesh_->rank(rank_).closed.store(true);
  for (int peer = 0; peer < mesh_->world_size(); ++peer) wake(peer);
}

}  // namespace bls::testing
