#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "channel/message.h"

namespace bls {

/// Far above any memory, far below overflow.
inline constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 46;

/// Where a part of `bytes` starts at `at` or behind: parts of a cache line or more at multiples of
/// 64, shorter ones at multiples of 16, so that receivers can use them in place.
constexpr uint64_t align_part(uint64_t at, uint64_t bytes) {
  return bytes >= 64 ? (at + 63) & ~uint64_t{63} : (at + 15) & ~uint64_t{15};
}

/// Where the parts of a message stand.
struct PartLayout {
  size_t count = 0;
  uint64_t end = 0;  ///< offset past the last part
  // Only the first `count` are set: zeroing the others would show in small messages.
  std::array<uint64_t, kMaxParts> offset;
  std::array<uint64_t, kMaxParts> bytes;

  /// Lays out `bytes` from `start` on. Throws std::length_error when the sizes overflow.
  void place(uint64_t start) {
    uint64_t at = start;
    for (size_t i = 0; i < count; ++i) {
      if (bytes[i] > kMaxMessageBytes || at > kMaxMessageBytes) {
        throw std::length_error("part " + std::to_string(i) + " has " + std::to_string(bytes[i]) +
                                " bytes");
      }
      offset[i] = align_part(at, bytes[i]);
      at = offset[i] + bytes[i];
    }
    end = at;
  }
};

/// memcpy without the call for the sizes of small messages.
inline void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes >= 8 && bytes <= 16) {
    uint64_t head;
    uint64_t tail;
    std::memcpy(&head, from, sizeof(head));
    std::memcpy(&tail, from + bytes - sizeof(tail), sizeof(tail));
    std::memcpy(to, &head, sizeof(head));
    std::memcpy(to + bytes - sizeof(tail), &tail, sizeof(tail));
    return;
  }
  std::memcpy(to, from, bytes);
}

/// Copies the blocks of a part one behind the other. Returns how many bytes they take, or more than
/// `room` if that is not enough; they are not all there then.
size_t copy_blocks(std::byte* to, size_t room, const Part& part);

/// Writes a part between `at` and `end`. Returns its bytes and moves `at` to its first one, or
/// returns SIZE_MAX if it does not fit.
[[gnu::noinline]] size_t put_part(std::byte* base, size_t& at, size_t end, const Part& part);

/// Writes all parts from 0 to `end`. Returns whether they fit; what stands in `layout` then is
/// where they are.
bool put_parts(std::byte* base, size_t end, const Message& message, PartLayout& layout);

/// Where the parts of `message` would stand from `start` on. Writers may have to do most of their
/// work for that.
PartLayout layout_of(const Message& message, uint64_t start);

/// Writes all parts to `bytes`, which they were measured to take.
void put_measured(std::byte* base, size_t bytes, const Message& message, PartLayout& layout);

}  // namespace bls
