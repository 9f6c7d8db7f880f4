#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/bounded/grid.h"
#include "codecs/matrix.h"

namespace bls::bounded {

/// What travels in place of a row.
enum RowKind : int8_t {
  kEscapedRow = -2,  ///< its values as they are
  kZeroRow = -1,     ///< nothing: all codes are 0
  kNewRow = 0,       ///< its codes
  kEarlierRow = 1,   ///< which new row it equals; plus the bits of that number, from 0 on
};

/// Rows whose codes and whose numbers are found in turn. A processor that does both for one row and
/// then for the next waits for each result that the next step needs.
constexpr size_t kRowsTogether = 32;

/// Which rows travel, and what is found out about them.
struct RowSearch {
  Matrix<const float> rows;
  const uint32_t* chosen;  ///< the rows that travel, or null for all
  size_t count;
  Grid grid;
  int8_t* kinds;      ///< of each row
  uint32_t* earlier;  ///< which new row each kEarlierRow equals, in their order
  uint32_t* slots;    ///< a hash table, zeroed; null if equal rows are not looked for
  size_t slot_mask;
  size_t new_count;  ///< found
  size_t earlier_count;
  size_t escaped_count;
};

/// Where rows that travelled come from.
struct RowSources {
  const int8_t* kinds;  ///< of each row
  size_t count;
  /// The number of its codes, where those of zero and escaped rows have 0 and new rows follow.
  uint32_t* sources;
  size_t new_count;  ///< found
  size_t escaped_count;
};

/// How symbols are encoded: each one's code in the highest bits, and its length.
struct CodeTable {
  uint64_t codes[256];
  uint8_t lengths[256];
};

/// What some bits begin with: in the low six bits how many the codes have that are whole there,
/// then a byte for the symbol of each, and in the highest two bits the number of these codes, up to
/// three. Those of the first code and of what follows it add up to that of both.
using DecodingEntry = uint32_t;

constexpr int kBitsOfSize = 6;

constexpr DecodingEntry decoding_entry(int place, int bits, uint8_t symbol) {
  return static_cast<uint32_t>(bits) | uint32_t{symbol} << (kBitsOfSize + 8 * place) | 1u << 30;
}

/// An entry for all that the next bits may be, no fewer than the longest code has; and the length
/// of each symbol's code.
struct DecodingTable {
  int shift;        ///< from 64 bits to these
  bool one_by_one;  ///< no entry has more than one symbol, and these are as long as codes may be
  DecodingEntry entries[1 << 11];
  uint8_t lengths[256];
};

constexpr size_t kMostStreams = 6;

/// How many streams so many symbols have. Each look into a decoding table waits for the one before
/// it in its stream; a processor reads several streams at once.
constexpr size_t streams_of(size_t symbols) {
  return symbols < 1024 ? 1 : symbols < 8192 ? 4 : kMostStreams;
}

/// Each ends where the next begins, and the last one by itself.
struct Streams {
  size_t count;
  const std::byte* begin[kMostStreams];
};

/// What takes the time of error-bounded rows, compiled for one instruction set.
struct Kernels {
  /// Writes the codes of new rows behind each other. Room is needed for those of all rows and
  /// kRowsTogether more. There are columns.
  void (*find_rows8)(RowSearch& search, int8_t* codes);
  void (*find_rows16)(RowSearch& search, int16_t* codes);
  /// Writes numbers of at most 32 bits without the highest bit that is set, which their kinds say.
  /// Returns the end; writes up to eight bytes beyond.
  std::byte* (*write_numbers)(const uint32_t* numbers, size_t count, std::byte* out);
  /// Reads these. Returns the end, or null where there is no such kind or new row, the bytes end
  /// within the numbers, or bits behind them are not 0.
  const std::byte* (*read_sources)(const std::byte* in, const std::byte* end, RowSources& found);
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
