#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/matrix.h"

namespace bls {

/// How the values of a table travel. The numbers are part of the wire format.
enum class Codec : uint8_t {
  kFloat32 = 0,   ///< as they are
  kFloat16 = 1,   ///< rounded to even; from 65,520 on infinite
  kBfloat16 = 2,  ///< rounded to even
  kUint8 = 3,     ///< by row, see rowwise.h
  kUint4 = 4,
  kUint2 = 5,
  kErrorBounded = 6,  ///< see bounded/bounded.h; needs a bound, which the functions below lack
};

constexpr uint8_t kCodecs = 7;

// These functions throw std::invalid_argument for kErrorBounded.

/// What `encode` writes for rows that are finite, and not of a range beyond all reason. It never
/// writes less.
size_t usual_bytes(Codec codec, size_t rows, size_t columns);

/// The most that `encode` writes.
size_t max_bytes(Codec codec, size_t rows, size_t columns);

/// Returns how many bytes the rows take, encoded, and writes them to `out` if it has so many.
size_t encode(Codec codec, const Matrix<const float>& rows, std::span<std::byte> out);

/// Reads what `encode` wrote for as many rows and columns, and returns how many bytes that is.
///
/// Throws ChannelError (kProtocol) if `in` cannot begin with that.
size_t decode(Codec codec, std::span<const std::byte> in, const Matrix<float>& rows);

}  // namespace bls
