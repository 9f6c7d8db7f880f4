#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "transport/ring_shape.h"
#include "transport/shm/shm_segment.h"
#include "transport/transport.h"

namespace bls {

/// Transport between processes of one host: each rank's inbox is one segment that all ranks map,
/// and a put is a store into it.
class ShmTransport final : public Transport {
 public:
  /// Reserves this rank's inbox. Peers are reachable after `connect`.
  explicit ShmTransport(const RingShape& shape);
  ~ShmTransport() override;

  const SegmentAddress& address() const { return own_.address(); }
  /// Maps the inboxes of all ranks (`addresses[rank]`, this rank's own included).
  void connect(std::span<const SegmentAddress> addresses);
  /// For use once every rank has returned from `connect`.
  void seal() { own_.close_descriptor(); }

  /// Poisons all ranks with a failure that may be another's, of a rank that need not be of this
  /// mesh.
  void tell(const Poison& poison);
  /// The poison as its teller has it, who is the origin in `poison`.
  Poison told_poison() const;

  size_t slot_bytes() const override { return slot_stride_; }
  size_t ring_bytes() const override { return own_.size() - ring_offset_; }
  std::byte* inbox(int source, uint32_t slot) override {
    return slot_at(own_.data(), source, slot);
  }
  std::byte* outbox(int destination, uint32_t slot) override {
    return slot_at(bases_[destination], shape_.rank, slot);
  }
  void deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) override;
  void return_credit(int source, uint64_t consumed) override;
  uint64_t credit(int destination) override;
  void tell_end(uint64_t count) override;
  uint64_t ended(int peer) override;
  std::byte* expose(int destination, uint32_t slot, size_t bytes, MemoryAddress& address) override;
  void retract(int destination, uint32_t slot) override;
  const std::byte* pull(int source, uint32_t slot, const MemoryAddress& memory,
                        size_t bytes) override;
  void drop(int source, uint32_t slot) override;
  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override;
  void wake_self() override;
  const std::atomic<uint32_t>& poisoned() const override;
  Poison poison() const override;
  void poison_all(const std::string& message) override { tell({shape_.rank, message}); }
  void pass_poison_on() override;
  PeerState peer_state(int peer) override;
  void announce_close() override;
  void abandon() override;

 private:
  struct ControlBlock;
  ControlBlock& control(int rank) const;
  std::atomic<uint64_t>& credit_word(int owner, int peer) const;
  void wake(int rank);
  void spread_poison(int origin);
  std::byte* slot_at(std::byte* base, int source, uint32_t slot) const {
    return base + ring_offset_ + (static_cast<size_t>(source) * shape_.slots + slot) * slot_stride_;
  }
  size_t pair_index(int peer, uint32_t slot) const {
    return static_cast<size_t>(peer) * shape_.slots + slot;
  }

  RingShape shape_;
  size_t slot_stride_;
  size_t ring_offset_;
  ShmSegment own_;
  std::vector<ShmSegment> peers_;     // empty at this rank's own place
  std::vector<std::byte*> bases_;     // mapped inbox of every rank, own included
  std::vector<int> process_handles_;  // pidfd of every peer, -1 where the kernel gave none
  std::vector<int> process_ids_;
  std::atomic<bool> has_failed_{false};
  std::vector<ShmSegment> exposed_;  // [destination][slot]
  std::vector<ShmSegment> pulled_;   // [source][slot]
};

}  // namespace bls
