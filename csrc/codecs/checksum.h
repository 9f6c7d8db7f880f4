#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace bls {

/// CRC-32C (Castagnoli), as of iSCSI and RFC 3720: 0xe3069283 for "123456789". Goes on after bytes
/// whose checksum is `before`.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before = 0);

}  // namespace bls
