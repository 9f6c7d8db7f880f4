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
};

/// Checks `counts[f]` ids for each `tables[f]`, which lie one behind the other. Throws
/// std::invalid_argument naming the first that its table does not have.
void check_lookup(std::span<const Table> tables, const std::byte* ids, size_t id_bytes,
                  std::span<const int64_t> counts);

}  // namespace bls
