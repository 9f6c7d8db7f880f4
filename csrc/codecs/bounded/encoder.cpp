#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "codecs/bounded/bounded.h"
#include "codecs/bounded/form.h"
#include "codecs/bounded/grid.h"
#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/scratch.h"
#include "codecs/bounded/symbols/bits.h"
#include "codecs/bounded/symbols/symbols.h"

namespace bls::bounded {
namespace {

// A row of fewer columns takes hardly more than to say which one it equals.
constexpr size_t kLeastColumnsSearched = 8;
// One in so many rows may be escaped before 16 bits a code cost less.
constexpr size_t kEscapedOfRows = 64;

struct EncoderScratch {
  Scratch<uint32_t> chosen, new_rows;
  Scratch<RowKey> keys;
  Scratch<int8_t> codes, kinds;
  Scratch<int16_t> wide_codes;
  Scratch<uint64_t> slots;
  Scratch<std::byte> out;
};

/// The rows that travel, quantized.
struct Quantized {
  Matrix<const float> rows;
  const uint32_t* chosen;
  size_t count;
  int low_bits = 0;
  RowSearch found{};

  const float* row(size_t index) const {
    return rows.row(chosen != nullptr ? chosen[index] : index);
  }
  size_t escaped() const {
    return static_cast<size_t>(std::count(found.keys, found.keys + count, kEscapedKey));
  }
};

const uint32_t* first_rows(const RowGroups& groups, size_t rows, Scratch<uint32_t>& scratch) {
  if (!groups.known()) return nullptr;
  if (groups.of_row.size() != rows) throw std::invalid_argument("groups are of another table");
  uint32_t* const first = scratch.of(rows);
  size_t next = 0;
  for (size_t row = 0; row < rows; ++row) {
    if (groups.of_row[row] > next) break;
    first[next] = static_cast<uint32_t>(row);
    next += groups.of_row[row] == next;
  }
  if (next != groups.count || groups.of_row[rows - 1] >= next) {
    throw std::invalid_argument("groups of rows are not numbered as they first appear");
  }
  return first;
}

/// Codes of eight bits, or of 16 where too many rows have values that eight bits have no code for.
void quantize(float bound, Quantized& rows, EncoderScratch& scratch) {
  RowKey* const keys = scratch.keys.of(rows.count);
  const size_t values = rows.count * rows.rows.columns;
  int8_t* const codes = scratch.codes.of(values);
  kernels().quantize8(rows.rows, rows.chosen, rows.count, grid_of(bound, 8), codes, keys);
  rows.found.keys = keys;
  rows.found.codes = reinterpret_cast<std::byte*>(codes);
  rows.found.row_bytes = rows.rows.columns;
  const size_t escaped = rows.escaped();
  if (escaped <= rows.count / kEscapedOfRows) return;
  int16_t* const wide = scratch.wide_codes.of(values);
  kernels().quantize16(rows.rows, rows.chosen, rows.count, grid_of(bound, 16), wide, keys);
  rows.found.codes = reinterpret_cast<std::byte*>(wide);
  rows.found.row_bytes = rows.rows.columns * sizeof *wide;
  rows.low_bits = 1;  // at least
  if (escaped - rows.escaped() > rows.count / kEscapedOfRows) return;
  // Those rows are escaped either way.
  kernels().quantize8(rows.rows, rows.chosen, rows.count, grid_of(bound, 8), codes, keys);
  rows.found.codes = reinterpret_cast<std::byte*>(codes);
  rows.found.row_bytes = rows.rows.columns;
  rows.low_bits = 0;
}

void find_rows(Quantized& rows, bool search, EncoderScratch& scratch) {
  RowSearch& found = rows.found;
  found.count = rows.count;
  found.kinds = scratch.kinds.of(rows.count);
  found.new_rows = scratch.new_rows.of(rows.count);
  if (search) {
    const size_t slots = std::bit_ceil(2 * rows.count);
    found.slots = scratch.slots.of(slots);
    found.slot_mask = slots - 1;
    std::fill_n(found.slots, slots, 0);
  }
  kernels().find_rows(found);
}

/// Which row each of those is that equal an earlier one, without the highest bit, which its kind
/// says.
std::byte* write_numbers(const RowSearch& found, std::byte* out) {
  BitWriter writer(out);
  for (size_t i = 0; i < found.earlier_count; ++i) {
    const int bits = std::bit_width(found.new_rows[i]);
    if (bits > 1) writer.put(found.new_rows[i] - (1u << (bits - 1)), bits - 1);
  }
  return writer.finish();
}

/// Splits codes of 16 bits: what is above the low bits, and those.
int split(const int16_t* codes, size_t count, int8_t* high) {
  int greatest = 0;
  for (size_t i = 0; i < count; ++i) greatest |= codes[i] ^ codes[i] >> 15;
  const auto bits = static_cast<int>(std::bit_width(static_cast<unsigned>(greatest)));
  const int low_bits = std::max(1, bits - 7);
  for (size_t i = 0; i < count; ++i) high[i] = static_cast<int8_t>(codes[i] >> low_bits);
  return low_bits;
}

std::byte* write_low_bits(const int16_t* codes, size_t count, int low_bits, std::byte* out) {
  BitWriter writer(out);
  for (size_t i = 0; i < count; ++i) {
    writer.put(static_cast<uint32_t>(codes[i]) & ((1u << low_bits) - 1), low_bits);
  }
  return writer.finish();
}

std::byte* write_escaped(const Quantized& rows, std::byte* out) {
  const size_t row_bytes = rows.rows.columns * sizeof(float);
  for (size_t i = 0; i < rows.count; ++i) {
    if (rows.found.kinds[i] != kEscapedRow) continue;
    std::memcpy(out, rows.row(i), row_bytes);
    out += row_bytes;
  }
  return out;
}

std::byte* write(Quantized& rows, EncoderScratch& scratch, std::byte* out) {
  const RowSearch& found = rows.found;
  const size_t values = found.new_count * rows.rows.columns;
  const auto* symbols = reinterpret_cast<const int8_t*>(found.codes);
  const auto* wide = reinterpret_cast<const int16_t*>(found.codes);
  if (rows.low_bits > 0) {
    int8_t* const high = scratch.codes.of(values);
    rows.low_bits = split(wide, values, high);
    symbols = high;
  }
  *out++ = static_cast<std::byte>(rows.low_bits);
  out = write_symbols(found.kinds, rows.count, out);
  out = write_numbers(found, out);
  out = write_symbols(symbols, values, out);
  if (rows.low_bits > 0) out = write_low_bits(wide, values, rows.low_bits, out);
  return write_escaped(rows, out);
}

std::byte* write_as_they_are(const Quantized& rows, std::byte* out) {
  const size_t row_bytes = rows.rows.columns * sizeof(float);
  *out++ = static_cast<std::byte>(kAsTheyAre);
  for (size_t i = 0; i < rows.count; ++i, out += row_bytes)
    std::memcpy(out, rows.row(i), row_bytes);
  return out;
}

/// The most that `write` may write before it is known how much that is.
size_t room_for(size_t rows, size_t columns) {
  return max_bytes(rows, columns) + room_for_symbols(rows) + rows * sizeof(uint32_t) +
         room_for_symbols(rows * columns);
}

}  // namespace

size_t encode(float bound, const Matrix<const float>& rows, const RowGroups& groups,
              std::span<std::byte> out) {
  static thread_local EncoderScratch scratch;
  check_bound(bound);
  const uint32_t* const chosen = first_rows(groups, rows.rows, scratch.chosen);
  Quantized travelling{rows, chosen, groups.travelling(rows.rows)};
  const size_t most = max_bytes(travelling.count, rows.columns);
  if (most == 0) return 0;
  quantize(bound, travelling, scratch);
  const bool search = !groups.known() && rows.columns >= kLeastColumnsSearched;
  find_rows(travelling, search, scratch);
  std::byte* const begin = scratch.out.of(room_for(travelling.count, rows.columns));
  const std::byte* end = write(travelling, scratch, begin);
  if (static_cast<size_t>(end - begin) >= most) end = write_as_they_are(travelling, begin);
  const auto bytes = static_cast<size_t>(end - begin);
  if (bytes <= out.size()) std::memcpy(out.data(), begin, bytes);
  return bytes;
}

}  // namespace bls::bounded
