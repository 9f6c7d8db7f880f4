#include "transport/ring_shape.h"

#include <stdexcept>
#include <string>

namespace bls {

size_t ring_bytes(size_t places, size_t slots, size_t slot_bytes) {
  if (slot_bytes > kMaxSlotBytes) {
    throw std::invalid_argument("slot_bytes is " + std::to_string(slot_bytes) + ", but at most " +
                                std::to_string(kMaxSlotBytes) +
                                " are possible: use the usual message size");
  }
  size_t bytes = 0;
  if (__builtin_mul_overflow(places, slots, &bytes) ||
      __builtin_mul_overflow(bytes, slot_stride(slot_bytes), &bytes) || bytes > kMaxRingBytes) {
    throw std::invalid_argument(std::to_string(places) + " x " + std::to_string(slots) +
                                " slots of " + std::to_string(slot_bytes) +
                                " bytes are more than the " + std::to_string(kMaxRingBytes) +
                                " bytes that a rank may have: lower slot_bytes, the bound or the "
                                "number of ranks");
  }
  return bytes;
}

}  // namespace bls
