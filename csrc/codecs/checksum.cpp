#include "codecs/checksum.h"

#include "codecs/kernels/kernels.h"

namespace bls {

uint32_t crc32c(std::span<const std::byte> bytes) {
  return ~kernels().crc32c(~uint32_t{0}, bytes.data(), bytes.size());
}

}  // namespace bls
