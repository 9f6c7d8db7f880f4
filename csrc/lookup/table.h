#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace bls {

/// An embedding table, row after row.
struct Table {
  const std::byte* data = nullptr;
  int64_t rows = 0;
  size_t row_bytes = 0;
  bool means = false;  ///< whether bags are pooled to means, not sums
  size_t pitch = 0;    ///< from row to row where rows are padded, which sums are not made of

  size_t step() const { return pitch != 0 ? pitch : row_bytes; }
};

/// Rows that ids name: those of feature f come from `tables[f]`. The ids lie one behind the other,
/// feature by feature.
struct Lookup {
  std::span<const Table> tables;  ///< [features]
  const std::byte* ids = nullptr;
  size_t id_bytes = 8;
  size_t count = 0;  ///< of ids
  /// The largest id of each feature, [features], or empty where it is not known.
  std::span<const int64_t> largest = {};
};

/// Checks `counts[f]` ids for each feature. Throws std::invalid_argument naming the first that its
/// table does not have.
void check_lookup(const Lookup& lookup, std::span<const int64_t> counts);

}  // namespace bls
