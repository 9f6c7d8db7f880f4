#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "channel/channel.h"

namespace bls {

/// Rows of a matrix grouped by feature and, within a feature, by rank in `order`:
/// `counts[feature * order.size() + place]` rows each. This is how a lookup returns the rows of
/// ids that BatchIds put together.
struct GroupedRows {
  size_t row_bytes = 0;
  std::span<const int64_t> counts;
  std::span<const int> order;

  size_t features() const { return counts.size() / order.size(); }
};

/// Posts to each rank its rows of `data`, feature by feature, gathered straight into the slots.
/// Without `to_self` this rank's own message is empty: it can read its rows in place (OwnRows).
void post_grouped_rows(Channel& channel, const std::byte* data, const GroupedRows& rows,
                       bool to_self = true);

/// The reverse: writes what each rank sent (its rows, feature by feature) to its groups in `out`.
void collect_grouped_rows(const Arrival& arrival, std::byte* out, const GroupedRows& rows);

/// The rows of a rank for itself, where its lookup left them.
struct OwnRows {
  int rank = -1;
  const std::byte* data = nullptr;
  GroupedRows rows;
};

/// Writes `rows_per_source[s]` rows of each rank to `out`, by rank; those of `own.rank`, if any,
/// come from `own`. With a permutation, row i of `out` is row `permutation[i]` of that
/// concatenation.
void collect_rows(const Arrival& arrival, std::byte* out, size_t row_bytes,
                  std::span<const int64_t> rows_per_source, std::span<const int64_t> permutation,
                  const OwnRows& own = {});

/// Columns of a pooled output that ranks `first` to `first + count` computed: the sum of their
/// partial results in rank order.
struct ColumnGroup {
  int first = 0;
  int count = 1;
  size_t offset_bytes = 0;  ///< of the columns in a row of the output
  size_t width_bytes = 0;
};

/// Writes `rows` rows of `out_row_bytes` to `out`. Groups of several ranks are summed as fp32.
void collect_columns(const Arrival& arrival, std::byte* out, size_t rows, size_t out_row_bytes,
                     std::span<const ColumnGroup> groups);

/// Where rows of a message go: row i to `offset + i * pitch`.
struct PlacedRows {
  size_t offset = 0;
  size_t rows = 0;
  size_t row_bytes = 0;
  size_t pitch = 0;
};

/// Writes each rank's rows to their places in `out`: the next `blocks_per_source[s]` of `placed`
/// are those of rank s, in the order of its message. What is between the rows of a block becomes
/// zero. Throws std::invalid_argument where a place is not in the `out_bytes` of `out`.
void collect_placed_rows(const Arrival& arrival, std::byte* out, size_t out_bytes,
                         std::span<const PlacedRows> placed,
                         std::span<const size_t> blocks_per_source);

}  // namespace bls
