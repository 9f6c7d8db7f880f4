#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace bls::bounded {

// Kernels use all of this. What is inlined always exists nowhere else: a copy for all of the
// program might have instructions that the processor lacks.
#define BLS_INLINE [[gnu::always_inline]] inline

/// Whole bytes of so many bits.
BLS_INLINE constexpr size_t bytes_of_bits(size_t bits) { return (bits + 7) / 8; }

/// Eight bytes of a bit stream, the first bit in the highest place.
BLS_INLINE uint64_t load_bits(const std::byte* from) {
  uint64_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return __builtin_bswap64(bits);
}

BLS_INLINE void store_bits(uint64_t bits, std::byte* to) {
  bits = __builtin_bswap64(bits);
  std::memcpy(to, &bits, sizeof bits);
}

/// Writes bits behind each other, the highest of each number and of each byte first.
class BitWriter {
 public:
  /// Room is needed for up to four bytes more than what is written.
  explicit BitWriter(std::byte* to) : to_(to) {}

  /// Adds the low `count` bits of `number`, which has no others; up to 32.
  void put(uint32_t number, int count) {
    bits_ |= uint64_t{number} << 1 << (63 - used_ - count);  // by 64 is no shift
    used_ += count;
    if (used_ < 32) return;
    store();
    to_ += 4;
    bits_ <<= 32;
    used_ -= 32;
  }
  /// Returns the end of the bytes, whose last one is filled up with zeros.
  std::byte* finish() {
    store();
    return to_ + bytes_of_bits(static_cast<size_t>(used_));
  }

 private:
  void store() {
    const uint32_t word = __builtin_bswap32(static_cast<uint32_t>(bits_ >> 32));
    std::memcpy(to_, &word, sizeof word);
  }

  std::byte* to_;
  uint64_t bits_ = 0;
  int used_ = 0;
};

/// Reads what a BitWriter wrote. Behind the end come zeros.
class BitReader {
 public:
  BLS_INLINE BitReader(const std::byte* from, const std::byte* end) : from_(from), end_(end) {}

  /// Bytes from the next bit on.
  BLS_INLINE size_t bytes_left() const {
    const auto bytes = static_cast<size_t>(end_ - from_);
    return used_ / 8 < bytes ? bytes - used_ / 8 : 0;
  }
  /// The next 57 bits or more, in the highest places, where eight bytes are left.
  BLS_INLINE uint64_t peek_surely() const { return load_bits(from_ + used_ / 8) << (used_ % 8); }
  /// The next 32 bits, in the highest places of 64.
  BLS_INLINE uint64_t peek() const {
    const std::byte* const at = from_ + used_ / 8;
    uint64_t bits = 0;
    if (end_ - at >= 8) {
      bits = load_bits(at);
    } else {
      for (int place = 0; place < 8 && place < end_ - at; ++place) {
        bits |= static_cast<uint64_t>(at[place]) << (56 - 8 * place);
      }
    }
    return bits << (used_ % 8) >> 32 << 32;
  }
  BLS_INLINE void skip(int count) { used_ += static_cast<size_t>(count); }
  /// A number of up to 32 bits.
  BLS_INLINE uint32_t take(int count) {
    const uint64_t bits = peek();
    skip(count);
    return static_cast<uint32_t>(bits >> 1 >> (63 - count));
  }
  /// The end of the bytes that are begun, or null where they go beyond the end or the bits left
  /// over in the last one are not zero.
  BLS_INLINE const std::byte* finish() const {
    const size_t bytes = bytes_of_bits(used_);
    if (bytes > static_cast<size_t>(end_ - from_)) return nullptr;
    if (used_ % 8 != 0 && (static_cast<uint32_t>(from_[bytes - 1]) << (used_ % 8) & 0xff) != 0) {
      return nullptr;
    }
    return from_ + bytes;
  }

 private:
  const std::byte* from_;
  const std::byte* end_;
  size_t used_ = 0;
};

#undef BLS_INLINE

}  // namespace bls::bounded
