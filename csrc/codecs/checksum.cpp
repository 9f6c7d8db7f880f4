#include "codecs/checksum.h"

#include "codecs/kernels/kernels.h"

namespace bls {

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
  return ~kernels().crc32c(~before, bytes.data(), bytes.size());
}

}  // namespace bls
