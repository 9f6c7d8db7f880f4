#include <doctest/doctest.h>

#include <map>
#include <random>
#include <vector>

#include "messages/ids/equal_bags.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

template <class Id>
const std::byte* bytes_of(const std::vector<Id>& items) {
  return reinterpret_cast<const std::byte*>(items.data());
}

std::vector<uint32_t> groups_of(const EqualBags& bags, size_t block) {
  const RowGroups& groups = bags.of(block);
  return {groups.of_row.begin(), groups.of_row.end()};
}

/// As a map finds them, whose keys are the ids of a bag.
template <class Length, class Id>
void compare_with_a_map(std::mt19937& random) {
  const auto below = [&](size_t end) {
    return std::uniform_int_distribution<size_t>(0, end - 1)(random);
  };
  std::vector<BagBlock> blocks(1 + below(4));
  std::vector<Length> lengths;
  std::vector<Id> ids;
  std::vector<std::vector<uint32_t>> expected;
  for (BagBlock& block : blocks) {
    block = {below(60), 0, below(4) > 0};
    std::map<std::vector<Id>, uint32_t> numbers;
    expected.emplace_back();
    for (size_t bag = 0; bag < block.bags; ++bag) {
      std::vector<Id> of_bag(below(4));
      for (Id& id : of_bag) id = static_cast<Id>(below(3)) - 1;
      lengths.push_back(static_cast<Length>(of_bag.size()));
      ids.insert(ids.end(), of_bag.begin(), of_bag.end());
      block.ids += of_bag.size();
      const auto number = numbers.emplace(of_bag, static_cast<uint32_t>(numbers.size()));
      if (block.wanted) expected.back().push_back(number.first->second);
    }
  }
  const EqualBags found({bytes_of(lengths), sizeof(Length), bytes_of(ids), sizeof(Id), blocks});
  REQUIRE(found.blocks() == blocks.size());
  for (size_t block = 0; block < blocks.size(); ++block) {
    CHECK(groups_of(found, block) == expected[block]);
    check_groups(found.of(block), expected[block].size());
  }
}

}  // namespace

TEST_CASE("bags of the same ids in the same order are one group") {
  std::mt19937 random(1);
  for (int turn = 0; turn < 200; ++turn) {
    compare_with_a_map<int32_t, int64_t>(random);
    compare_with_a_map<int64_t, int32_t>(random);
  }
}

TEST_CASE("without lengths each id is a bag") {
  const std::vector<int64_t> ids{7, -1, 7, 5, 5, 7};
  const std::vector<BagBlock> blocks{{3, 3, true}, {0, 0, true}, {1, 1, false}, {2, 2, true}};
  const EqualBags bags({nullptr, 8, bytes_of(ids), 8, blocks});
  CHECK(groups_of(bags, 0) == std::vector<uint32_t>{0, 1, 0});
  CHECK(bags.of(0).count == 2);
  CHECK_FALSE(bags.of(1).known());
  CHECK_FALSE(bags.of(2).known());
  CHECK(groups_of(bags, 3) == std::vector<uint32_t>{0, 1});
}

TEST_CASE("lengths that do not add up to a block's ids are refused") {
  const std::vector<int32_t> lengths{2, -1}, ids{1, 2};
  for (const size_t count : {0, 1, 2}) {
    const std::vector<BagBlock> blocks{{2, count, true}};
    CHECK(failure_of([&] { EqualBags({bytes_of(lengths), 4, bytes_of(ids), 4, blocks}); }));
  }
}
