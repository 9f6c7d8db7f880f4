#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "messages/ids/batch_ids.h"

namespace bls {

/// Rows of a table that lie together: a message asks for those that a feature needs of them.
struct AskedBlock {
  size_t feature;
  int64_t first, end;  ///< rows of the table
};

/// What a batch asks for. Each distinct row of a feature has a number below `distinct[feature]`,
/// the same in all tables that the feature is looked up in, and the numbers of one block follow one
/// another.
struct AskedRows {
  std::shared_ptr<IdsMemory> numbers;  ///< of the row of each id, in the type of the ids
  std::shared_ptr<IdsMemory> rows;     ///< asked for, of all blocks, counted from their first row
  std::vector<int64_t> counts;         ///< of each block
  std::vector<int64_t> first_numbers;  ///< of each block
  std::vector<int64_t> distinct;       ///< rows of each feature
};

/// Finds what to ask the ranks for.
class RowRequests {
 public:
  /// The blocks of all tables, in the order of their messages; the blocks of a table cover it. A
  /// feature without blocks is not looked up, and its ids stay as they are. Throws
  /// std::invalid_argument for a block of another feature, or that ends before it begins.
  RowRequests(size_t features, std::vector<AskedBlock> blocks);

  /// `counts[f]` ids of `id_bytes` for each feature, one feature behind the other. Throws
  /// std::invalid_argument for counts of other features, and for an id that no block has.
  AskedRows ask(const std::byte* ids, size_t id_bytes, std::span<const int64_t> counts) const;

  /// Of a row that is asked for.
  size_t row_bytes() const { return row_bytes_; }

 private:
  std::vector<AskedBlock> blocks_;
  /// Of each feature, where a block of one of its tables begins or ends.
  std::vector<std::vector<int64_t>> cuts_;
  size_t row_bytes_ = sizeof(int32_t);
};

}  // namespace bls
