#pragma once

#include <cstddef>

#include "codecs/matrix.h"

namespace bls {

/// Rows of quantized tables, as FBGEMM stores them in memory: scale and shift in float16, codes,
/// and zeros.
namespace stored_rows {

constexpr size_t kHeadBytes = 4;  ///< scale and shift of a row

/// Stores rows as INT8, `row_bytes` apart, with the bits of FBGEMM's
/// FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf at 8 bits, which works value by value:
///
///   shift = float16(least), scale = float16((greatest - shift) / 255), or 1 where that is 0,
///   code = round to even((x - shift) * (1 / scale)), from 0 to 255.
///
/// Returns how many rows it has stored. The one behind them is left to FBGEMM: it holds NaN or
/// infinities, its scale or shift is beyond float16, or its least value is one of both zeros, which
/// differ by the order of the values.
///
/// Throws std::invalid_argument if `row_bytes` are too few.
size_t store_int8(const Matrix<const float>& rows, size_t row_bytes, std::byte* out);

}  // namespace stored_rows
}  // namespace bls
