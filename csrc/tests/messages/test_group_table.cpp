#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>
#include <vector>

#include "messages/ids/equal_bags.h"
#include "messages/ids/group_table.h"
#include "messages/ids/hash_key.h"

using namespace bls;

namespace {

HashKey random_key(std::mt19937_64& random) { return {random(), random(), random()}; }

uint64_t hash_of(const HashKey& key, int64_t id) { return key.of(static_cast<uint64_t>(id)); }

/// Different ids in the order of their hashes: those that come first share few slots.
template <class Hash>
std::vector<int64_t> side_by_side(size_t count, const Hash& hash) {
  std::vector<int64_t> ids(32 * count);
  std::iota(ids.begin(), ids.end(), 0);
  std::sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return hash(a) < hash(b); });
  ids.resize(count);
  return ids;
}

struct Outcome {
  size_t probes = 0;  // of slots that other groups have
  bool gave_up = false;
};

Outcome put_into_table(const std::vector<int64_t>& ids, const HashKey& key) {
  Outcome outcome;
  GroupTable table;
  table.clear(ids.size());
  std::vector<int64_t> first;
  for (const int64_t id : ids) {
    const uint32_t group = table.find(table.slot_of(hash_of(key, id)), [&](uint32_t g) {
      ++outcome.probes;
      return first[g] == id;
    });
    if (group == GroupTable::kNone) {
      outcome.gave_up = true;
      break;
    }
    if (group == first.size()) first.push_back(id);
  }
  return outcome;
}

std::vector<uint32_t> groups_of(const std::vector<int64_t>& ids, const HashKey& key) {
  const std::vector<BagBlock> blocks{{ids.size(), ids.size(), true}};
  const EqualBags bags({nullptr, 8, reinterpret_cast<const std::byte*>(ids.data()), 8, blocks},
                       key);
  CHECK(bags.of(0).count ==
        1 + *std::max_element(bags.of(0).of_row.begin(), bags.of(0).of_row.end()));
  return {bags.of(0).of_row.begin(), bags.of(0).of_row.end()};
}

/// Each id twice, the second time in another order.
std::vector<int64_t> repeated(std::vector<int64_t> ids, std::mt19937_64& random) {
  std::vector<int64_t> again = ids;
  std::shuffle(again.begin(), again.end(), random);
  ids.insert(ids.end(), again.begin(), again.end());
  return ids;
}

}  // namespace

TEST_CASE("ids chosen without the key take few probes") {
  std::mt19937_64 random(1);
  // An older release's hash had no key. The other choice is right for another process's key.
  const auto unkeyed = [](int64_t id) { return static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15; };
  const HashKey other = random_key(random);
  for (const size_t count : {12'500, 100'000, 400'000}) {
    std::vector<std::vector<int64_t>> choices;
    choices.push_back(side_by_side(count, unkeyed));
    choices.push_back(side_by_side(count, [&](int64_t id) { return hash_of(other, id); }));
    choices.emplace_back(count);
    std::iota(choices.back().begin(), choices.back().end(), 0);  // what a product keeps in order
    for (const auto& ids : choices) {
      for (int turn = 0; turn < static_cast<int>(1'250'000 / count); ++turn) {
        const Outcome outcome = put_into_table(ids, random_key(random));
        CHECK_FALSE(outcome.gave_up);
        CHECK(outcome.probes < count);
      }
    }
    CHECK(put_into_table(choices[1], other).gave_up);  // with the key they would not
  }
}

TEST_CASE("no ids take more probes than are allowed") {
  std::mt19937_64 random(2);
  const HashKey key = random_key(random);
  for (const size_t count : {12'500, 100'000, 400'000}) {
    const auto ids = side_by_side(count, [&](int64_t id) { return hash_of(key, id); });
    const Outcome outcome = put_into_table(repeated(ids, random), key);
    CHECK(outcome.gave_up);
    CHECK(outcome.probes <= 2 * count * (GroupTable::kMostProbes + 1));
  }
}

TEST_CASE("sorted ids have the groups that hashed ones have") {
  std::mt19937_64 random(3);
  const HashKey known = random_key(random), other = random_key(random);
  for (const size_t count : {100, 12'500}) {
    auto ids = side_by_side(count, [&](int64_t id) { return hash_of(known, id); });
    std::shuffle(ids.begin(), ids.end(), random);
    ids = repeated(ids, random);
    REQUIRE(put_into_table(ids, known).gave_up);
    REQUIRE_FALSE(put_into_table(ids, other).gave_up);
    CHECK(groups_of(ids, known) == groups_of(ids, other));
    CHECK(groups_of(ids, known) == groups_of(ids, process_hash_key()));
  }
}

TEST_CASE("sorted bags have the groups that hashed ones have") {
  std::mt19937_64 random(4);
  const HashKey known = random_key(random), other = random_key(random);
  // Bags of two ids that share slots, some empty ones, and bags that begin like others.
  const size_t count = 4000;
  const auto hash = [&](int64_t id) {
    const int64_t bag[] = {5, id};
    return known.of(bag, 2);
  };
  auto second = repeated(side_by_side(count, hash), random);
  std::vector<int32_t> lengths;
  std::vector<int64_t> ids;
  for (const int64_t id : second) {
    const auto length = static_cast<int32_t>(random() % 16 == 0 ? random() % 4 : 2);
    const int64_t bag[] = {5, id, id % 3};
    lengths.push_back(length);
    ids.insert(ids.end(), bag, bag + length);
  }
  const std::vector<BagBlock> blocks{{0, 0, true}, {lengths.size(), ids.size(), true}};
  const BagsOfIds given{reinterpret_cast<const std::byte*>(lengths.data()), 4,
                        reinterpret_cast<const std::byte*>(ids.data()), 8, blocks};
  const EqualBags by_known(given, known), by_other(given, other);
  CHECK(by_known.of(1).count == by_other.of(1).count);
  CHECK(std::ranges::equal(by_known.of(1).of_row, by_other.of(1).of_row));
  check_groups(by_known.of(1), lengths.size());
}

TEST_CASE("the key of a process stays, and another one has other hashes") {
  CHECK(hash_of(process_hash_key(), 7) == hash_of(process_hash_key(), 7));
  std::mt19937_64 random(5);
  CHECK(hash_of(random_key(random), 7) != hash_of(random_key(random), 7));
}
