#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "codecs/checksum.h"
#include "codecs/frame.h"
#include "host/instruction_set.h"

namespace bls::testing {

using Bytes = std::vector<std::byte>;

/// Each instruction set in turn, and the best one when it is done.
template <typename Body>
void on_each_instruction_set(Body body) {
  for (const std::string_view name : instruction_sets()) {
    use_instruction_set(name);
    CAPTURE(std::string(name));
    body();
  }
}

/// A frame in memory of just the size that was announced.
inline Bytes frame_of(std::span<const FrameTable<const float>> tables) {
  Bytes out(encode_frame(tables, {}));
  CHECK(encode_frame(tables, out) == out.size());
  return out;
}

inline std::string hex(const Bytes& bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(bytes[i]));
    text += digits;
    if (i % 4 == 3) text += ' ';
  }
  return text;
}

/// As whoever changes a byte of a frame and knows the checksum.
inline Bytes changed(Bytes bytes, size_t at, uint8_t value) {
  bytes.at(at) = std::byte{value};
  const uint32_t checksum = crc32c({bytes.data() + 8, bytes.size() - 8});
  std::memcpy(bytes.data() + 4, &checksum, sizeof checksum);
  return bytes;
}

}  // namespace bls::testing
