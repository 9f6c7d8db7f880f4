#include <algorithm>
#include <cstring>
#include <numeric>

#include "codecs/bounded/bounded.h"
#include "codecs/bounded/form.h"
#include "codecs/bounded/grid.h"
#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/refuse.h"
#include "codecs/bounded/symbols/bits.h"
#include "codecs/bounded/symbols/symbols.h"
#include "codecs/scratch.h"

namespace bls::bounded {
namespace {

struct DecoderScratch {
  Scratch<int8_t> kinds, codes;
  Scratch<int16_t> wide_codes;
  Scratch<uint32_t> sources, sources_of_rows;
};

const std::byte* join_low_bits(const std::byte* in, const std::byte* end, const int8_t* high,
                               size_t count, int low_bits, int16_t* codes) {
  BitReader reader(in, end);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t low = reader.take(low_bits);
    codes[i] = static_cast<int16_t>(high[i] * (1 << low_bits) + static_cast<int>(low));
  }
  in = reader.finish();
  if (in == nullptr) refuse("end within the low bits of codes, or with bits that must be 0");
  return in;
}

/// The sources of a table's rows from those of the groups' rows; it also checks that these are
/// right. There is a group.
const uint32_t* for_rows(const uint32_t* sources, const RowGroups& groups, size_t rows,
                         Scratch<uint32_t>& scratch) {
  if (!groups.known()) return sources;
  uint32_t* const of_rows = scratch.of(groups.of_row.size());
  GroupsInOrder in_order;
  for (size_t row = 0; row < groups.of_row.size(); ++row) {
    const uint32_t group = groups.of_row[row];
    in_order.take(group);
    of_rows[row] = sources[group < groups.count ? group : 0];
  }
  in_order.check(groups, rows);
  return of_rows;
}

/// Returns the end of rows that travel as they are.
const std::byte* copy_rows(const std::byte* in, const std::byte* end, const Matrix<float>& rows,
                           const RowGroups& groups) {
  const size_t row_bytes = rows.columns * sizeof(float);
  const size_t bytes = groups.travelling(rows.rows) * row_bytes;
  if (static_cast<size_t>(end - in) < bytes) refuse("travel as they are, but not all of them");
  for (size_t row = 0; row < rows.rows; ++row) {
    const size_t index = groups.known() ? groups.of_row[row] : row;
    std::memcpy(rows.row(row), in + index * row_bytes, row_bytes);
  }
  return in + bytes;
}

/// Reads where the rows that travelled come from.
RowSources read_sources(const std::byte*& in, const std::byte* end, bool all_new, size_t count,
                        DecoderScratch& scratch) {
  uint32_t* const sources = scratch.sources.of(count);
  if (all_new) {
    std::iota(sources, sources + count, 1);  // behind that of zero rows
    return {nullptr, count, sources, count, 0};
  }
  int8_t* const kinds = scratch.kinds.of(count);
  in = read_symbols(in, end, kinds, count);
  RowSources found{kinds, count, sources, 0, 0};
  in = kernels().read_sources(in, end, found);
  if (in == nullptr) refuse("say something impossible of which rows are equal");
  return found;
}

void copy_escaped(const std::byte* in, const RowSources& found, const Matrix<float>& rows,
                  const RowGroups& groups) {
  const size_t row_bytes = rows.columns * sizeof(float);
  uint32_t* const numbers = found.sources;  // whose use is over
  uint32_t next = 0;
  for (size_t index = 0; index < found.count; ++index) {
    if (found.kinds[index] == kEscapedRow) numbers[index] = next++;
  }
  for (size_t row = 0; row < rows.rows; ++row) {
    const size_t index = groups.known() ? groups.of_row[row] : row;
    if (found.kinds[index] != kEscapedRow) continue;
    std::memcpy(rows.row(row), in + numbers[index] * row_bytes, row_bytes);
  }
}

}  // namespace

size_t decode(float bound, std::span<const std::byte> bytes, const Matrix<float>& rows,
              const RowGroups& groups) {
  static thread_local DecoderScratch scratch;
  check_bound(bound);
  const std::byte *in = bytes.data(), *const end = in + bytes.size();
  const size_t count = groups.travelling(rows.rows), columns = rows.columns;
  if (count * columns == 0) {
    check_groups(groups, rows.rows);
    return 0;
  }
  if (bytes.empty()) refuse("have no bytes");
  const auto form = static_cast<int>(*in++);
  const auto bytes_until = [&](const std::byte* last) {
    return static_cast<size_t>(last - bytes.data());
  };
  if (form == kAsTheyAre) {
    check_groups(groups, rows.rows);
    return bytes_until(copy_rows(in, end, rows, groups));
  }
  const int low_bits = form & ~kAllNew;
  if (low_bits > kMostLowBits) refuse("are of an unknown form");

  const RowSources found = read_sources(in, end, (form & kAllNew) != 0, count, scratch);
  const size_t values = found.new_count * columns;
  int8_t* const codes = scratch.codes.of(columns + values);
  std::memset(codes, 0, columns);
  in = read_symbols(in, end, codes + columns, values);
  const uint32_t* const of_rows =
      for_rows(found.sources, groups, rows.rows, scratch.sources_of_rows);
  const int16_t* wide = nullptr;
  if (low_bits > 0) {
    int16_t* const joined = scratch.wide_codes.of(columns + values);
    std::fill_n(joined, columns, int16_t{0});
    in = join_low_bits(in, end, codes + columns, values, low_bits, joined + columns);
    wide = joined;
  }
  const size_t escaped_bytes = found.escaped_count * columns * sizeof(float);
  if (static_cast<size_t>(end - in) < escaped_bytes) {
    refuse("end within the values of their escaped rows");
  }
  if (low_bits > 0) {
    kernels().dequantize16(wide, of_rows, grid_of(bound, 16).scale, rows);
  } else {
    kernels().dequantize8(codes, of_rows, grid_of(bound, 8).scale, rows);
  }
  if (found.escaped_count > 0) copy_escaped(in, found, rows, groups);
  return bytes_until(in + escaped_bytes);
}

}  // namespace bls::bounded
