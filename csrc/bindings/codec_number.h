#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "codecs/codec.h"

namespace bls {

/// Throws std::invalid_argument for the number of no codec.
inline Codec codec_of(uint8_t number) {
  if (number >= kCodecs) throw std::invalid_argument("no codec " + std::to_string(number));
  return static_cast<Codec>(number);
}

}  // namespace bls
