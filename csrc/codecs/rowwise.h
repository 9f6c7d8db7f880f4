#pragma once

#include <cstddef>
#include <span>

#include "codecs/matrix.h"

namespace bls {

/// Row-wise quantization on a uniform grid between a row's least and greatest value (Quantized
/// Collectives, section 3.1), at 8, 4 or 2 bits:
///
///   scale = (greatest - least) / steps, code = round to even((x - least) * (steps / (greatest -
///   least))), x' = least + code * scale, each step rounded to float32.
///
/// The scale is then rounded to 24 - bits significant bits, for which code * scale is exact. So a
/// row that was decoded is encoded to itself, and x' is the same with a fused multiply-add.
///
/// A row takes scale, least (float32 each) and its codes, the first ones in the low bits of their
/// byte, zero bits up to a whole byte. A row that holds NaN, a magnitude from 2^127 on (infinities
/// too), or a range from 2^126 on is escaped: its scale is NaN and its codes are zero; behind all
/// rows stand the values of the escaped ones as they are, in their order. Scales are 0 or at least
/// 2^-126, so that no step has a subnormal result that some processors round to zero.
namespace rowwise {

constexpr size_t kHeadBytes = 2 * sizeof(float);  ///< scale and least value of a row

/// Bytes of a row's codes.
constexpr size_t code_bytes(int bits, size_t columns) {
  return (columns * static_cast<size_t>(bits) + 7) / 8;
}

/// Bytes of `rows` rows without escaped values.
size_t bytes_without_escapes(int bits, size_t rows, size_t columns);

/// The most that `encode` writes.
size_t max_bytes(int bits, size_t rows, size_t columns);

/// Returns how many bytes the rows take, encoded, and writes them to `out` if it has so many.
///
/// Throws std::invalid_argument if `bits` are not 8, 4 or 2.
size_t encode(int bits, const Matrix<const float>& rows, std::span<std::byte> out);

/// Reads what `encode` wrote for as many rows and columns, and returns how many bytes that is.
///
/// Throws ChannelError (kProtocol) if `in` cannot begin with that.
size_t decode(int bits, std::span<const std::byte> in, const Matrix<float>& rows);

}  // namespace rowwise
}  // namespace bls
