#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/matrix.h"

namespace bls {

/// Which rows of a table both ends know to belong together, since their ids are the same for
/// instance. One row of each group travels: the first one, or the sum of all. Where nothing is
/// known each row travels for itself.
struct RowGroups {
  std::span<const uint32_t> of_row{};  ///< numbered in the order in which groups first appear
  size_t count = 0;

  bool known() const { return !of_row.empty(); }
  size_t travelling(size_t rows) const { return known() ? count : rows; }
};

/// Throws std::invalid_argument unless `groups`, if known, are those of so many rows, numbered as
/// they first appear.
void check_groups(const RowGroups& groups, size_t rows);

/// The same check for those who go through the groups of all rows anyway.
class GroupsInOrder {
 public:
  /// Whether this is the first row of `group`.
  bool take(uint32_t group) {
    right_ &= group <= next_;
    const bool is_first = group == next_;
    next_ += is_first;
    return is_first;
  }
  /// Groups that came so far.
  uint32_t count() const { return next_; }
  /// Throws as `check_groups` does, once all rows were taken.
  void check(const RowGroups& groups, size_t rows) const;

 private:
  uint32_t next_ = 0;
  bool right_ = true;
};

// The groups below are known and checked. What travels of them is [groups.count x columns].

/// Writes the first row of each group, or the sum of its rows in their order.
void gather_groups(const Matrix<const float>& rows, const RowGroups& groups, bool summed,
                   float* out);

/// Writes what travelled of a group to all of its rows, or a sum to the first and 0 to the others.
void spread_groups(const float* in, const RowGroups& groups, bool summed,
                   const Matrix<float>& rows);

}  // namespace bls
