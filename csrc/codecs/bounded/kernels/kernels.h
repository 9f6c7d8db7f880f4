#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/bounded/grid.h"
#include "codecs/matrix.h"

namespace bls::bounded {

/// What quantizing finds out about a row: that all its codes are 0, that it has to be escaped, or
/// else a hash of its codes.
using RowKey = uint32_t;
constexpr RowKey kZeroKey = 0, kEscapedKey = 1, kFirstHash = 2;

/// What travels in place of a row.
enum RowKind : int8_t {
  kEscapedRow = -2,  ///< its values as they are
  kZeroRow = -1,     ///< nothing: all codes are 0
  kNewRow = 0,       ///< its codes
  kEarlierRow = 1,   ///< which new row it equals; plus the bits of that number, from 0 on
};

/// What `find_rows` makes of the codes of `count` rows of `row_bytes` each.
struct RowSearch {
  std::byte* codes;  ///< in the end the new rows alone, behind each other
  size_t row_bytes;
  size_t count;
  const RowKey* keys;
  uint64_t* slots;  ///< a hash table, zeroed; null if equal rows are not looked for
  size_t slot_mask;
  int8_t* kinds;       ///< of each row
  uint32_t* new_rows;  ///< number of the new row that each kEarlierRow equals, in their order
  size_t new_count;    ///< found
  size_t earlier_count;
};

/// How symbols are encoded: each one's code in the highest bits, and its length.
struct CodeTable {
  uint64_t codes[256];
  uint8_t lengths[256];
};

/// What any kLongestCode bits begin with: from the low byte on, the bits of all codes that are
/// whole there (of one or two), how many these are, and their symbols. And the length of each
/// symbol's code.
struct DecodingTable {
  uint32_t entries[1 << 11];
  uint8_t lengths[256];
};

/// One stream or four; each ends where the next begins, and the last one by itself.
struct Streams {
  size_t count;
  const std::byte* begin[4];
};

/// What takes the time of error-bounded rows, compiled for one instruction set.
struct Kernels {
  /// Codes of rows, behind each other, and their keys. Row i is row `chosen[i]` where some are
  /// chosen. The codes of escaped rows have no meaning. `columns` are not 0.
  void (*quantize8)(const Matrix<const float>& rows, const uint32_t* chosen, size_t count,
                    const Grid& grid, int8_t* codes, RowKey* keys);
  void (*quantize16)(const Matrix<const float>& rows, const uint32_t* chosen, size_t count,
                     const Grid& grid, int16_t* codes, RowKey* keys);
  void (*find_rows)(RowSearch& search);
  /// How often each symbol occurs, by its place.
  void (*count_symbols)(const int8_t* symbols, size_t count, uint32_t* counts);
  /// Returns the end of the stream; writes up to eight bytes beyond.
  std::byte* (*write_stream)(const CodeTable& table, const int8_t* symbols, size_t count,
                             std::byte* out);
  /// Returns the end of the last stream, or null if one is not of the right length, goes beyond
  /// `end` or has other bits than 0 behind its last code.
  const std::byte* (*read_streams)(const DecodingTable& table, const Streams& streams,
                                   const std::byte* end, int8_t* symbols, size_t count);
  /// Row i becomes that of the codes of row `sources[i]`.
  void (*dequantize8)(const int8_t* codes, const uint32_t* sources, float scale,
                      const Matrix<float>& rows);
  void (*dequantize16)(const int16_t* codes, const uint32_t* sources, float scale,
                       const Matrix<float>& rows);
};

/// Those of `instruction_set`.
const Kernels& kernels();

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace bls::bounded
