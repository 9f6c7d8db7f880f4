#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bls {

/// How many rows a block has. Each id is divided by it, so that it is kept as a factor, too.
class BlockLength {
 public:
  explicit BlockLength(int64_t rows)
      : rows_(static_cast<uint64_t>(rows)),
        factor_(rows_ > 1 && rows_ <= kMost ? ~uint64_t{0} / rows_ + 1 : 0) {}

  /// The block of an id, which is not negative.
  ///
  /// The factor is 2^64 / rows, rounded up. The product with an id below 2^32 exceeds the true
  /// quotient by less than 1 / rows then, which never leads to the next whole number.
  size_t block_of(int64_t id) const {
    const auto number = static_cast<uint64_t>(id);
    if (factor_ == 0 || number > kMost) return number / rows_;
    return static_cast<size_t>((static_cast<unsigned __int128>(factor_) * number) >> 64);
  }

  size_t rows() const { return rows_; }

 private:
  static constexpr uint64_t kMost = 0xffffffff;

  uint64_t rows_;
  uint64_t factor_;  ///< 0 where the product would not be exact
};

/// Some columns of a table, whose rows lie in blocks, in the order of the ranks that own them.
struct TableColumns {
  size_t column_byte = 0;  ///< in a row of the whole table
  size_t row_bytes = 0;    ///< of these columns
  BlockLength rows_per_block{1};
  std::vector<const std::byte*> blocks;
  std::vector<size_t> owners;  ///< ranks, one of each block

  size_t block_of(int64_t id) const { return blocks.size() == 1 ? 0 : rows_per_block.block_of(id); }

  const std::byte* row(int64_t id, size_t block) const {
    return blocks[block] + (static_cast<size_t>(id) - block * rows_per_block.rows()) * row_bytes;
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
