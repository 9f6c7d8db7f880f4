#pragma once

#include <cstdint>
#include <string>

namespace bls {

/// The label of a message says which call it belongs to (docs/design/forwards.md). Python makes it
/// (torchrec_bls/collective/forwards.py): the low bits of the forward's number, below them those of
/// the call's place in the forward, and on top whether autograd was on. Ranks may differ in the
/// last one.
inline constexpr uint32_t kPlaceBits = 8;
inline constexpr uint32_t kCallBits = 31;
inline constexpr uint32_t kCall = (1u << kCallBits) - 1;

constexpr bool same_call(uint32_t label, uint32_t other) { return ((label ^ other) & kCall) == 0; }

inline std::string text_of_call(uint32_t label) {
  return "forward " + std::to_string((label & kCall) >> kPlaceBits) + ", call " +
         std::to_string(label & ((1u << kPlaceBits) - 1));
}

}  // namespace bls
