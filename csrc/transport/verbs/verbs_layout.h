#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "transport/ring_shape.h"

namespace bls {

inline constexpr size_t kPoisonText = 1020;

/// What a peer writes about itself into the inbox region. In the outbox region the same place holds
/// the poison that is written to that peer.
struct PeerBlock {
  alignas(kCacheLine) std::atomic<uint64_t> credit;  ///< messages that it has read
  std::atomic<uint64_t> closed;
  std::atomic<uint64_t> ended;                 ///< see Transport::tell_end
  alignas(kCacheLine) uint32_t poison_origin;  ///< the rank that failed, plus 1
  char poison_text[kPoisonText];
};
static_assert(sizeof(PeerBlock) == 1088);

/// Where things stand in an inbox region, and in the outbox region of the same shape:
///
///     poison word, alone in a cache line | a PeerBlock per place | slots from a page on, by place
///
/// Places are the ranks, or fewer where a rank reaches only some. Slots that no memory can hold are
/// refused by std::invalid_argument.
class VerbsLayout {
 public:
  VerbsLayout(uint32_t places, uint32_t slots, size_t slot_bytes)
      : places_(places),
        slots_(slots),
        stride_(slot_stride(slot_bytes)),
        ring_(align_up(block_offset(places), kPage)),
        ring_bytes_(bls::ring_bytes(places, slots, slot_bytes)) {}

  size_t stride() const { return stride_; }
  size_t bytes() const { return ring_ + ring_bytes_; }
  size_t ring_bytes() const { return ring_bytes_; }
  static constexpr size_t block_offset(uint32_t place) {
    return kCacheLine + place * sizeof(PeerBlock);
  }
  size_t slot_offset(uint32_t place, uint32_t slot) const {
    return ring_ + (size_t{place} * slots_ + slot) * stride_;
  }

  /// Begins the lifetime of the words in zeroed memory.
  void prepare(std::byte* region) const {
    new (region) std::atomic<uint32_t>(0);
    for (uint32_t place = 0; place < places_; ++place) {
      new (region + block_offset(place)) PeerBlock{};
    }
  }
  static std::atomic<uint32_t>& poison_word(std::byte* region) {
    return *std::launder(reinterpret_cast<std::atomic<uint32_t>*>(region));
  }
  static PeerBlock& block(std::byte* region, uint32_t place) {
    return *std::launder(reinterpret_cast<PeerBlock*>(region + block_offset(place)));
  }

 private:
  uint32_t places_;
  uint32_t slots_;
  size_t stride_;
  size_t ring_;
  size_t ring_bytes_;
};

}  // namespace bls
