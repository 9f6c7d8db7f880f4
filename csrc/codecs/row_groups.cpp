#include "codecs/row_groups.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace bls {

void check_groups(const RowGroups& groups, size_t rows) {
  if (!groups.known()) return;
  GroupsInOrder in_order;
  for (const uint32_t group : groups.of_row) in_order.take(group);
  in_order.check(groups, rows);
}

void GroupsInOrder::check(const RowGroups& groups, size_t rows) const {
  if (right_ && next_ == groups.count && groups.of_row.size() == rows) return;
  throw std::invalid_argument("groups of rows are not those of the table, as they first appear");
}

void gather_groups(const Matrix<const float>& rows, const RowGroups& groups, bool summed,
                   float* out) {
  const size_t columns = rows.columns;
  uint32_t next = 0;
  for (size_t row = 0; row < rows.rows; ++row) {
    const uint32_t group = groups.of_row[row];
    const float* const from = rows.row(row);
    float* const to = out + group * columns;
    if (group == next) {
      std::memcpy(to, from, columns * sizeof(float));
      ++next;
    } else if (summed) {
      for (size_t column = 0; column < columns; ++column) to[column] += from[column];
    }
  }
}

void spread_groups(const float* in, const RowGroups& groups, bool summed,
                   const Matrix<float>& rows) {
  const size_t columns = rows.columns;
  uint32_t next = 0;
  for (size_t row = 0; row < rows.rows; ++row) {
    const uint32_t group = groups.of_row[row];
    float* const to = rows.row(row);
    const bool is_first = group == next;
    next += is_first;
    if (is_first || !summed) {
      std::memcpy(to, in + group * columns, columns * sizeof(float));
    } else {
      std::fill_n(to, columns, 0.0f);
    }
  }
}

}  // namespace bls
