#include "messages/ids/equal_bags.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

#include "messages/ids/jagged_ids.h"

namespace bls {
namespace {

/// Groups of one block, found by their hashes. Its memory is used for the next block again.
class GroupTable {
 public:
  void clear(size_t bags) {
    const size_t slots = std::bit_ceil(2 * bags);
    shift_ = 64 - std::countr_zero(slots);
    mask_ = slots - 1;
    slots_.assign(slots, 0);
    count_ = 0;
  }

  size_t count() const { return count_; }

  /// The number of the group that `is_equal(group)` says yes to, or of a new one.
  template <class IsEqual>
  uint32_t find(uint64_t hash, const IsEqual& is_equal) {
    // A table of one slot has no bits to take from the hash.
    for (size_t slot = shift_ == 64 ? 0 : hash >> shift_;; slot = (slot + 1) & mask_) {
      if (slots_[slot] == 0) {
        slots_[slot] = ++count_;
        return count_ - 1;
      }
      const uint32_t group = slots_[slot] - 1;
      if (is_equal(group)) return group;
    }
  }

 private:
  std::vector<uint32_t> slots_;  // a group's number and one; 0: free
  int shift_ = 64;
  size_t mask_ = 0;
  uint32_t count_ = 0;
};

// The golden ratio's bits: ids that differ by little are spread over all slots.
constexpr uint64_t kSpread = 0x9e3779b97f4a7c15;

template <class Id>
void group_ids(const Id* ids, size_t count, GroupTable& table, std::vector<uint64_t>& first,
               uint32_t* groups) {
  table.clear(count);
  first.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const auto id = static_cast<uint64_t>(ids[i]);
    groups[i] = table.find(id * kSpread, [&](uint32_t group) { return first[group] == id; });
    first[groups[i]] = id;
  }
}

struct Bag {
  uint64_t hash;
  size_t at, ids;
};

template <class Length, class Id>
void group_bags(const Length* lengths, size_t bags, const Id* ids, GroupTable& table,
                std::vector<Bag>& first, uint32_t* groups) {
  table.clear(bags);
  first.resize(bags);
  size_t at = 0;
  for (size_t i = 0; i < bags; ++i) {
    const auto length = static_cast<size_t>(lengths[i]);
    uint64_t hash = length * kSpread;
    for (size_t j = at; j < at + length; ++j) {
      hash = (std::rotl(hash, 29) ^ static_cast<uint64_t>(ids[j])) * kSpread;
    }
    groups[i] = table.find(hash, [&](uint32_t group) {
      const Bag& other = first[group];
      return other.hash == hash && other.ids == length &&
             std::equal(ids + at, ids + at + length, ids + other.at);
    });
    first[groups[i]] = {hash, at, length};
    at += length;
  }
}

/// Finds the groups of one block after the other.
class Grouping {
 public:
  explicit Grouping(const BagsOfIds& bags) : bags_(bags) {}

  RowGroups next(const BagBlock& block, uint32_t* groups) {
    check(block);
    const bool known = block.wanted && block.bags > 0;
    if (known) {
      if (bags_.id_bytes == 4) {
        group(reinterpret_cast<const int32_t*>(bags_.ids) + ids_, block, groups);
      } else {
        group(reinterpret_cast<const int64_t*>(bags_.ids) + ids_, block, groups);
      }
    }
    lengths_ += block.bags * bags_.length_bytes;
    ids_ += block.ids;
    return known ? RowGroups{{groups, block.bags}, table_.count()} : RowGroups{};
  }

 private:
  void check(const BagBlock& block) const {
    if (block.bags > std::numeric_limits<uint32_t>::max() / 2) {
      throw std::invalid_argument(std::to_string(block.bags) + " bags of one feature");
    }
    const int64_t ids = bags_.lengths == nullptr
                            ? static_cast<int64_t>(block.bags)
                            : sum_lengths(bags_.lengths + lengths_, block.bags, bags_.length_bytes);
    if (ids == static_cast<int64_t>(block.ids)) return;
    throw std::invalid_argument("lengths of bags add up to " + std::to_string(ids) +
                                " ids in place of " + std::to_string(block.ids));
  }

  template <class Id>
  void group(const Id* ids, const BagBlock& block, uint32_t* groups) {
    if (bags_.lengths == nullptr) {
      group_ids(ids, block.ids, table_, first_ids_, groups);
    } else if (bags_.length_bytes == 4) {
      const auto* lengths = reinterpret_cast<const int32_t*>(bags_.lengths + lengths_);
      group_bags(lengths, block.bags, ids, table_, first_bags_, groups);
    } else {
      const auto* lengths = reinterpret_cast<const int64_t*>(bags_.lengths + lengths_);
      group_bags(lengths, block.bags, ids, table_, first_bags_, groups);
    }
  }

  const BagsOfIds& bags_;
  size_t lengths_ = 0, ids_ = 0;  // bytes and ids of the blocks behind
  GroupTable table_;
  std::vector<uint64_t> first_ids_;
  std::vector<Bag> first_bags_;
};

}  // namespace

EqualBags::EqualBags(const BagsOfIds& bags) {
  size_t count = 0;
  for (const BagBlock& block : bags.blocks) count += block.bags;
  of_bag_.resize(count);
  groups_.reserve(bags.blocks.size());
  Grouping grouping(bags);
  uint32_t* groups = of_bag_.data();
  for (const BagBlock& block : bags.blocks) {
    groups_.push_back(grouping.next(block, groups));
    groups += block.bags;
  }
}

}  // namespace bls
