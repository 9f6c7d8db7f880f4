#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bls {

/// Some columns of a table, whose rows lie in blocks: row r is row r % rows_per_block of block
/// r / rows_per_block. The blocks are in the order of the ranks that own them.
struct TableColumns {
  size_t column_byte = 0;  ///< in a row of the whole table
  size_t row_bytes = 0;    ///< of these columns
  int64_t rows_per_block = 1;
  std::vector<const std::byte*> blocks;

  const std::byte* row(int64_t id) const {
    if (blocks.size() == 1) return blocks[0] + static_cast<size_t>(id) * row_bytes;
    const auto block = static_cast<size_t>(id / rows_per_block);
    const auto place = static_cast<size_t>(id % rows_per_block);
    return blocks[block] + place * row_bytes;
  }
};

/// A feature and the table that it is looked up in, wherever its shards lie.
struct ShardedFeature {
  size_t key = 0;       ///< place of the feature in the batch
  size_t out_byte = 0;  ///< where a sample's sums go in its row of the output
  bool means = false;   ///< whether bags are pooled to means, not sums
  std::vector<TableColumns> columns;
};

}  // namespace bls
