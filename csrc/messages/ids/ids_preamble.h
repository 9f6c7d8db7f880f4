#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace bls {

/// First part of every message: what the receiver needs to read the others.
struct IdsPreamble {
  int64_t stride;
  uint32_t length_bytes;
  uint32_t value_bytes;
  uint32_t weight_bytes;
  uint32_t flags;
  uint64_t updates;
  std::array<uint64_t, 3> wanted_slot_bytes;
};
static_assert(sizeof(IdsPreamble) == 56);

enum IdsFlag : uint32_t { kEnded = 1, kRefused = 2 };
inline constexpr uint32_t kKnownFlags = kEnded | kRefused;

/// A refused batch has the reason in place of weights.
enum IdsPart : size_t { kPreamble, kLengths, kValues, kWeights, kReason = kWeights };

}  // namespace bls
