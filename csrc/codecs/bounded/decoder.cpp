#include <algorithm>
#include <cstring>

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

// A part of what processors keep of their own.
constexpr size_t kBytesAhead = size_t{1} << 18;

RowsAhead first_rows(const Matrix<float>& rows) {
  const size_t most = kBytesAhead / sizeof(float) / rows.columns;
  return {rows.data, std::min(rows.rows, most), rows.columns, rows.stride};
}

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

void copy_rows(const std::byte* in, const std::byte* end, const Matrix<float>& rows,
               const RowGroups& groups) {
  const size_t row_bytes = rows.columns * sizeof(float);
  if (static_cast<size_t>(end - in) != groups.travelling(rows.rows) * row_bytes) {
    refuse("travel as they are, but are not as many as expected");
  }
  for (size_t row = 0; row < rows.rows; ++row) {
    const size_t index = groups.known() ? groups.of_row[row] : row;
    std::memcpy(rows.row(row), in + index * row_bytes, row_bytes);
  }
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

void decode(float bound, std::span<const std::byte> bytes, const Matrix<float>& rows,
            const RowGroups& groups) {
  static thread_local DecoderScratch scratch;
  check_bound(bound);
  const std::byte *in = bytes.data(), *const end = in + bytes.size();
  const size_t count = groups.travelling(rows.rows), columns = rows.columns;
  if (count * columns == 0) {
    check_groups(groups, rows.rows);
    if (!bytes.empty()) refuse("have bytes but no values");
    return;
  }
  if (bytes.empty()) refuse("have no bytes");
  const auto low_bits = static_cast<int>(*in++);
  if (low_bits == kAsTheyAre) {
    check_groups(groups, rows.rows);
    return copy_rows(in, end, rows, groups);
  }
  if (low_bits > kMostLowBits) refuse("are of an unknown form");

  int8_t* const kinds = scratch.kinds.of(count);
  in = read_symbols(in, end, kinds, count);
  RowSources found{kinds, count, scratch.sources.of(count), 0, 0};
  in = kernels().read_sources(in, end, found);
  if (in == nullptr) refuse("say something impossible of which rows are equal");

  const size_t values = found.new_count * columns;
  int8_t* const codes = scratch.codes.of(columns + values);
  std::memset(codes, 0, columns);
  in = read_symbols(in, end, codes + columns, values, first_rows(rows));
  const uint32_t* const of_rows =
      for_rows(found.sources, groups, rows.rows, scratch.sources_of_rows);
  const int16_t* wide = nullptr;
  if (low_bits > 0) {
    int16_t* const joined = scratch.wide_codes.of(columns + values);
    std::fill_n(joined, columns, int16_t{0});
    in = join_low_bits(in, end, codes + columns, values, low_bits, joined + columns);
    wide = joined;
  }
  if (static_cast<size_t>(end - in) != found.escaped_count * columns * sizeof(float)) {
    refuse("do not end with the values of their escaped rows");
  }
  if (low_bits > 0) {
    kernels().dequantize16(wide, of_rows, grid_of(bound, 16).scale, rows);
  } else {
    kernels().dequantize8(codes, of_rows, grid_of(bound, 8).scale, rows);
  }
  if (found.escaped_count > 0) copy_escaped(in, found, rows, groups);
}

}  // namespace bls::bounded
