#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/matrix.h"
#include "codecs/row_groups.h"

namespace bls {

/// Error-bounded rows (Dual-Level Adaptive Lossy Compression, section III-D): |x - x'| <= bound for
/// every value, after docs/wire-format.md. Rows that hold NaN, an infinity or a value too large for
/// the grid travel as they are, bit for bit. Equal rows travel once, and what is left of them as a
/// prefix code.
namespace bounded {

/// Throws std::invalid_argument unless 2^-126 <= bound <= 2^110.
void check_bound(float bound);

/// The least that `encode` writes for so many rows that travel.
constexpr size_t min_bytes(size_t rows, size_t columns) { return rows * columns == 0 ? 0 : 3; }

/// The most that `encode` writes for so many rows that travel.
constexpr size_t max_bytes(size_t rows, size_t columns) {
  return rows * columns == 0 ? 0 : 1 + rows * columns * sizeof(float);
}

/// Returns how many bytes the rows take, encoded, and writes them to `out` if it has so many.
///
/// Throws std::invalid_argument for a bound or groups that are none. Rows of one group are not
/// compared: the first one stands for all. With `fixed_width` all codes of a table are as long: it
/// takes less time and more bytes.
size_t encode(float bound, const Matrix<const float>& rows, const RowGroups& groups,
              bool fixed_width, std::span<std::byte> out);

/// Reads what `encode` wrote for the same bound, shape and groups, and returns how many bytes that
/// is.
///
/// Throws ChannelError (kProtocol) if `in` cannot begin with that; some rows may be written then.
size_t decode(float bound, std::span<const std::byte> in, const Matrix<float>& rows,
              const RowGroups& groups);

}  // namespace bounded
}  // namespace bls
