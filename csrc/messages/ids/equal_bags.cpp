#include "messages/ids/equal_bags.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "codecs/scratch.h"
#include "messages/ids/group_table.h"
#include "messages/ids/jagged_ids.h"

namespace bls {
namespace {

/// Numbers groups as they first appear. `less` is a strict order of rows, in which those of a group
/// are equal.
template <class Less>
uint32_t sort_into_groups(size_t rows, const Less& less, uint32_t* groups) {
  std::vector<uint32_t> order(rows);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), less);
  uint32_t first = 0;  // the group's first row
  for (size_t i = 0; i < rows; ++i) {
    if (i == 0 || less(order[i - 1], order[i])) first = order[i];
    groups[order[i]] = first;
  }
  uint32_t count = 0;
  for (uint32_t row = 0; row < rows; ++row) {
    groups[row] = groups[row] == row ? count++ : groups[groups[row]];
  }
  return count;
}

/// The first of each group.
struct Bag {
  uint64_t hash;
  size_t at, ids;
};

struct GroupingScratch {
  GroupTable table;
  Scratch<uint64_t> ids;
  Scratch<Bag> bags;
};

// Slots are found and fetched for so many ids before the first of them is looked for.
constexpr size_t kIdsTogether = 32;

template <class Id>
uint32_t group_ids(const Id* ids, size_t count, const HashKey& key, GroupingScratch& scratch,
                   uint32_t* groups) {
  GroupTable& table = scratch.table;
  table.clear(count);
  uint64_t* const first = scratch.ids.of(count);
  size_t slots[kIdsTogether];
  for (size_t begin = 0; begin < count; begin += kIdsTogether) {
    const size_t end = std::min(begin + kIdsTogether, count);
    for (size_t i = begin; i < end; ++i) {
      slots[i - begin] = table.slot_of(key.of(static_cast<uint64_t>(ids[i])));
      __builtin_prefetch(table.slots() + slots[i - begin]);
    }
    for (size_t i = begin; i < end; ++i) {
      const auto id = static_cast<uint64_t>(ids[i]);
      const uint32_t group =
          table.find(slots[i - begin], [&](uint32_t other) { return first[other] == id; });
      if (group == GroupTable::kNone) {
        const auto less = [&](uint32_t a, uint32_t b) { return ids[a] < ids[b]; };
        return sort_into_groups(count, less, groups);
      }
      first[group] = id;
      groups[i] = group;
    }
  }
  return table.count();
}

template <class Length, class Id>
uint32_t sort_bags(const Length* lengths, size_t bags, const Id* ids, uint32_t* groups) {
  std::vector<std::span<const Id>> bag(bags);
  for (size_t i = 0; i < bags; ++i) {
    bag[i] = {ids, static_cast<size_t>(lengths[i])};
    ids += bag[i].size();
  }
  const auto less = [&](uint32_t a, uint32_t b) {
    if (bag[a].size() != bag[b].size()) return bag[a].size() < bag[b].size();
    return std::ranges::lexicographical_compare(bag[a], bag[b]);
  };
  return sort_into_groups(bags, less, groups);
}

template <class Length, class Id>
uint32_t group_bags(const Length* lengths, size_t bags, const Id* ids, const HashKey& key,
                    GroupingScratch& scratch, uint32_t* groups) {
  GroupTable& table = scratch.table;
  table.clear(bags);
  Bag* const first = scratch.bags.of(bags);
  size_t at = 0;
  for (size_t i = 0; i < bags; ++i) {
    const auto length = static_cast<size_t>(lengths[i]);
    const uint64_t hash = key.of(ids + at, length);
    const uint32_t group = table.find(table.slot_of(hash), [&](uint32_t number) {
      const Bag& other = first[number];
      return other.hash == hash && other.ids == length &&
             std::equal(ids + at, ids + at + length, ids + other.at);
    });
    if (group == GroupTable::kNone) return sort_bags(lengths, bags, ids, groups);
    first[group] = {hash, at, length};
    groups[i] = group;
    at += length;
  }
  return table.count();
}

/// Finds the groups of one block after the other.
class Grouping {
 public:
  Grouping(const BagsOfIds& bags, const HashKey& key, GroupingScratch& scratch)
      : bags_(bags), key_(key), scratch_(scratch) {}

  RowGroups next(const BagBlock& block, uint32_t* groups) {
    check(block);
    RowGroups found;
    if (block.wanted && block.bags > 0) {
      found.of_row = {groups, block.bags};
      found.count = bags_.id_bytes == 4
                        ? group(reinterpret_cast<const int32_t*>(bags_.ids) + ids_, block, groups)
                        : group(reinterpret_cast<const int64_t*>(bags_.ids) + ids_, block, groups);
    }
    lengths_ += block.bags * bags_.length_bytes;
    ids_ += block.ids;
    return found;
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
  uint32_t group(const Id* ids, const BagBlock& block, uint32_t* groups) {
    if (bags_.lengths == nullptr) {
      return group_ids(ids, block.ids, key_, scratch_, groups);
    }
    if (bags_.length_bytes == 4) {
      const auto* lengths = reinterpret_cast<const int32_t*>(bags_.lengths + lengths_);
      return group_bags(lengths, block.bags, ids, key_, scratch_, groups);
    }
    const auto* lengths = reinterpret_cast<const int64_t*>(bags_.lengths + lengths_);
    return group_bags(lengths, block.bags, ids, key_, scratch_, groups);
  }

  const BagsOfIds& bags_;
  const HashKey& key_;
  size_t lengths_ = 0, ids_ = 0;  // bytes and ids of the blocks behind
  GroupingScratch& scratch_;
};

}  // namespace

EqualBags::EqualBags(const BagsOfIds& bags, const HashKey& key) {
  size_t count = 0;
  for (const BagBlock& block : bags.blocks) count += block.bags;
  of_bag_ = std::make_unique_for_overwrite<uint32_t[]>(count);
  groups_.reserve(bags.blocks.size());
  static thread_local GroupingScratch scratch;
  Grouping grouping(bags, key, scratch);
  uint32_t* groups = of_bag_.get();
  for (const BagBlock& block : bags.blocks) {
    groups_.push_back(grouping.next(block, groups));
    groups += block.bags;
  }
}

}  // namespace bls
