#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "codecs/matrix.h"

namespace bls {

/// What takes the time in codec.h, rowwise.h and checksum.h, compiled for one instruction set. All
/// have the same results, bit for bit. Matrices have at least one column.
struct Kernels {
  const char* name;
  bool (*run_here)();

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
};

/// Those of the best instruction set of this processor, unless another was chosen.
const Kernels& kernels();

/// Names of those that run here, the best last.
std::vector<std::string_view> instruction_sets();

/// Chooses one of `instruction_sets` for all later calls, for tests.
///
/// Throws std::invalid_argument if it does not run here.
void use_instruction_set(std::string_view name);

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace bls
