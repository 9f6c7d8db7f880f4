#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "codecs/scratch.h"

namespace bls {

/// Numbers of groups, found by their hashes. Its memory is used for the next rows again.
class GroupTable {
 public:
  /// Slots of other groups that a row may look at, on average. At most a quarter of the slots is
  /// taken, so that rows with random hashes look at 1/6 of a slot (Knuth, volume 3, 6.4).
  static constexpr size_t kMostProbes = 8;
  static constexpr uint32_t kNone = UINT32_MAX;

  void clear(size_t rows) {
    const size_t slots = std::bit_ceil(std::max<size_t>(4 * rows, 2));
    shift_ = 64 - std::countr_zero(slots);
    mask_ = slots - 1;
    std::fill_n(slots_.of(slots), slots, 0);
    count_ = 0;
    probes_left_ = kMostProbes * rows;
  }

  uint32_t count() const { return count_; }

  /// Where `find` begins.
  size_t slot_of(uint64_t hash) const { return hash >> shift_; }
  const uint32_t* slots() { return slots_.of(0); }

  /// The number of the group that `is_equal(group)` says yes to, or of a new one, the `count`
  /// before. kNone once all probes are used up: hashes collide that should not, and another way has
  /// to be taken.
  template <class IsEqual>
  uint32_t find(size_t slot, const IsEqual& is_equal) {
    uint32_t* const slots = slots_.of(0);
    for (;; slot = (slot + 1) & mask_) {
      if (slots[slot] == 0) {
        slots[slot] = ++count_;
        return count_ - 1;
      }
      const uint32_t group = slots[slot] - 1;
      if (is_equal(group)) return group;
      if (probes_left_ == 0) return kNone;
      --probes_left_;
    }
  }

 private:
  Scratch<uint32_t> slots_;  // a group's number and one; 0: free
  int shift_ = 0;
  size_t mask_ = 0;
  size_t probes_left_ = 0;
  uint32_t count_ = 0;
};

}  // namespace bls
