#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/rank_names.h"

namespace bls {

/// What the ranks agree on before memory is shared. `slots` per ordered pair of ranks.
struct RingShape {
  int rank = 0;
  int world_size = 1;
  uint32_t slots = 2;
  size_t slot_bytes = 4096;
  RankNames names{};  ///< in errors
};

inline constexpr size_t kCacheLine = 64;
inline constexpr size_t kPage = 4096;
/// Far above any memory, far below overflow: of a slot, and of all slots of a rank.
inline constexpr size_t kMaxSlotBytes = size_t{1} << 40;
inline constexpr size_t kMaxRingBytes = size_t{1} << 46;

constexpr size_t align_up(size_t value, size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

/// Bytes from slot to slot.
constexpr size_t slot_stride(size_t slot_bytes) {
  const size_t stride = align_up(slot_bytes, kCacheLine);
  // Headers of all slots would share one cache set if the stride were a multiple of a page.
  return stride % kPage == 0 ? stride + 2 * kCacheLine : stride;
}

/// Bytes of `slots` slots for each of `places` ranks, `slot_stride` apart. Throws
/// std::invalid_argument beyond the limits above.
size_t ring_bytes(size_t places, size_t slots, size_t slot_bytes);

}  // namespace bls
