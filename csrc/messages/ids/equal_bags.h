#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "codecs/row_groups.h"
#include "messages/ids/hash_key.h"

namespace bls {

/// Consecutive bags of ids: those of one feature and one rank.
struct BagBlock {
  size_t bags;
  size_t ids;
  bool wanted;  ///< whether groups are asked for
};

/// BagsOfIds of all blocks, one block behind the other.
struct BagsOfIds {
  const std::byte* lengths = nullptr;  ///< int32 or int64; null where each id is a bag of its own
  size_t length_bytes = 8;
  const std::byte* ids = nullptr;  ///< int32 or int64
  size_t id_bytes = 8;
  std::span<const BagBlock> blocks;
};

/// Which bags of a block hold the same ids in the same order. Their rows are equal, and both ends
/// of an exchange can tell from the ids. Groups are numbered as they first appear, whatever the key
/// is.
class EqualBags {
 public:
  /// Throws std::invalid_argument when the lengths of a block do not add up to its ids.
  explicit EqualBags(const BagsOfIds& bags, const HashKey& key = process_hash_key());
  EqualBags(EqualBags&&) = default;  // not copied: groups point into the memory

  size_t blocks() const { return groups_.size(); }
  /// Nothing is known of a block that is not wanted. The memory is that of this object.
  const RowGroups& of(size_t block) const { return groups_[block]; }

 private:
  std::unique_ptr<uint32_t[]> of_bag_;  // nothing where a block is not wanted
  std::vector<RowGroups> groups_;
};

}  // namespace bls
