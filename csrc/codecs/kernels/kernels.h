#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/matrix.h"

namespace bls {

/// What takes the time in codec.h, rowwise.h, checksum.h and stored_rows.h, compiled for one
/// instruction set. Matrices have at least one column.
struct Kernels {
  /// As `rowwise::encode` where everything but the escaped values fits before `end`.
  size_t (*encode_rowwise)(int bits, const Matrix<const float>& rows, std::byte* out,
                           const std::byte* end);
  /// Rows that `encode_rowwise` escapes.
  size_t (*count_escaped)(const Matrix<const float>& rows);
  /// As `rowwise::decode`; returns the end of the escaped values that it used, or nullptr if they
  /// go beyond `end`.
  const std::byte* (*decode_rowwise)(int bits, const std::byte* in, const std::byte* end,
                                     const Matrix<float>& rows);
  void (*to_float16)(const float* values, size_t count, std::byte* out);
  void (*from_float16)(const std::byte* in, size_t count, float* values);
  void (*to_bfloat16)(const float* values, size_t count, std::byte* out);
  void (*from_bfloat16)(const std::byte* in, size_t count, float* values);
  /// The checksum before its last negation, from that of what comes before `bytes`.
  uint32_t (*crc32c)(uint32_t crc, const std::byte* bytes, size_t count);
  /// As `stored_rows::store_int8`.
  size_t (*store_int8)(const Matrix<const float>& rows, size_t row_bytes, std::byte* out);
};

/// Those of `instruction_set`.
const Kernels& kernels();

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace bls
