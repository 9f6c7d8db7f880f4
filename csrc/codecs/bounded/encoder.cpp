#include <algorithm>
#include <bit>
#include <cstring>

#include "codecs/bounded/bounded.h"
#include "codecs/bounded/form.h"
#include "codecs/bounded/grid.h"
#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/symbols/bits.h"
#include "codecs/bounded/symbols/symbols.h"
#include "codecs/scratch.h"

namespace bls::bounded {
namespace {

// A row of fewer columns takes hardly more than to say which one it equals.
constexpr size_t kLeastColumnsSearched = 8;
// One in so many rows may be escaped before 16 bits a code cost less.
constexpr size_t kEscapedOfRows = 64;

struct EncoderScratch {
  Scratch<uint32_t> chosen, earlier, slots;
  Scratch<int8_t> kinds, codes;
  Scratch<int16_t> wide_codes;
  Scratch<std::byte> out;
};

/// Of each group that is known; it also checks that these are right.
const uint32_t* first_rows(const RowGroups& groups, size_t rows, Scratch<uint32_t>& scratch) {
  if (!groups.known()) return nullptr;
  uint32_t* const first = scratch.of(groups.of_row.size());
  GroupsInOrder in_order;
  for (size_t row = 0; row < groups.of_row.size(); ++row) {
    first[in_order.count()] = static_cast<uint32_t>(row);
    in_order.take(groups.of_row[row]);
  }
  in_order.check(groups, rows);
  return first;
}

/// The rows that travel, and the codes of the new ones: of eight bits, or of 16.
struct Quantized {
  RowSearch found{};
  const int8_t* codes = nullptr;
  const int16_t* wide_codes = nullptr;

  const float* row(size_t index) const {
    return found.rows.row(found.chosen != nullptr ? found.chosen[index] : index);
  }
};

void clear_slots(RowSearch& search, Scratch<uint32_t>& scratch) {
  const size_t slots = std::bit_ceil(2 * search.count);
  search.slots = scratch.of(slots);
  search.slot_mask = slots - 1;
  std::fill_n(search.slots, slots, 0);
}

size_t room_for_codes(const RowSearch& search) {
  return (search.count + kRowsTogether) * search.rows.columns;
}

void quantize8(float bound, bool search, Quantized& rows, EncoderScratch& scratch) {
  if (search) clear_slots(rows.found, scratch.slots);
  rows.found.grid = grid_of(bound, 8);
  int8_t* const codes = scratch.codes.of(room_for_codes(rows.found));
  kernels().find_rows8(rows.found, codes);
  rows.codes = codes;
}

void quantize16(float bound, bool search, Quantized& rows, EncoderScratch& scratch) {
  if (search) clear_slots(rows.found, scratch.slots);
  rows.found.grid = grid_of(bound, 16);
  int16_t* const codes = scratch.wide_codes.of(room_for_codes(rows.found));
  kernels().find_rows16(rows.found, codes);
  rows.wide_codes = codes;
}

/// Takes 16 bits where too many rows have values that eight have no code for.
Quantized quantize(float bound, const Matrix<const float>& rows, const uint32_t* chosen,
                   size_t count, EncoderScratch& scratch) {
  Quantized quantized;
  quantized.found.rows = rows;
  quantized.found.chosen = chosen;
  quantized.found.count = count;
  quantized.found.kinds = scratch.kinds.of(count);
  quantized.found.earlier = scratch.earlier.of(count);
  const bool search = chosen == nullptr && rows.columns >= kLeastColumnsSearched;
  quantize8(bound, search, quantized, scratch);
  const size_t escaped = quantized.found.escaped_count, most = count / kEscapedOfRows;
  if (escaped <= most) return quantized;
  quantize16(bound, search, quantized, scratch);
  if (escaped - quantized.found.escaped_count > most) return quantized;
  // These rows are escaped either way.
  quantized.wide_codes = nullptr;
  quantize8(bound, search, quantized, scratch);
  return quantized;
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
  const size_t row_bytes = rows.found.rows.columns * sizeof(float);
  for (size_t i = 0; i < rows.found.count; ++i) {
    if (rows.found.kinds[i] != kEscapedRow) continue;
    std::memcpy(out, rows.row(i), row_bytes);
    out += row_bytes;
  }
  return out;
}

std::byte* write(const Quantized& rows, bool fixed_width, EncoderScratch& scratch, std::byte* out) {
  const RowSearch& found = rows.found;
  const size_t values = found.new_count * found.rows.columns;
  const int8_t* symbols = rows.codes;
  int low_bits = 0;
  if (rows.wide_codes != nullptr) {
    int8_t* const high = scratch.codes.of(values);
    low_bits = split(rows.wide_codes, values, high);
    symbols = high;
  }
  const bool all_new = found.new_count == found.count;
  *out++ = static_cast<std::byte>(low_bits + (all_new ? kAllNew : 0));
  if (!all_new) out = write_symbols(found.kinds, found.count, fixed_width, out);
  out = kernels().write_numbers(found.earlier, found.earlier_count, out);
  out = write_symbols(symbols, values, fixed_width, out);
  if (low_bits > 0) out = write_low_bits(rows.wide_codes, values, low_bits, out);
  return write_escaped(rows, out);
}

std::byte* write_as_they_are(const Quantized& rows, std::byte* out) {
  const size_t row_bytes = rows.found.rows.columns * sizeof(float);
  *out++ = static_cast<std::byte>(kAsTheyAre);
  for (size_t i = 0; i < rows.found.count; ++i, out += row_bytes) {
    std::memcpy(out, rows.row(i), row_bytes);
  }
  return out;
}

/// The most that `write` may write before it is known how much that is.
size_t room_for(size_t rows, size_t columns) {
  return max_bytes(rows, columns) + room_for_symbols(rows) + rows * sizeof(uint32_t) +
         room_for_symbols(rows * columns);
}

}  // namespace

size_t encode(float bound, const Matrix<const float>& rows, const RowGroups& groups,
              bool fixed_width, std::span<std::byte> out) {
  static thread_local EncoderScratch scratch;
  check_bound(bound);
  const uint32_t* const chosen = first_rows(groups, rows.rows, scratch.chosen);
  const size_t count = groups.travelling(rows.rows), most = max_bytes(count, rows.columns);
  if (most == 0) return 0;
  const Quantized quantized = quantize(bound, rows, chosen, count, scratch);
  std::byte* const begin = scratch.out.of(room_for(count, rows.columns));
  const std::byte* end = write(quantized, fixed_width, scratch, begin);
  if (static_cast<size_t>(end - begin) >= most) end = write_as_they_are(quantized, begin);
  const auto bytes = static_cast<size_t>(end - begin);
  if (bytes <= out.size()) std::memcpy(out.data(), begin, bytes);
  return bytes;
}

}  // namespace bls::bounded
