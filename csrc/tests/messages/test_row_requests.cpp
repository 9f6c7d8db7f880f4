#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "messages/ids/row_requests.h"

using namespace bls;

namespace {

template <class Item>
std::vector<Item> items_of(const IdsMemory& memory) {
  std::vector<Item> items(memory.bytes / sizeof(Item));
  if (!items.empty()) std::memcpy(items.data(), memory.data.get(), memory.bytes);
  return items;
}

template <class Id>
AskedRows ask(const RowRequests& requests, const std::vector<Id>& ids,
              const std::vector<int64_t>& counts) {
  return requests.ask(reinterpret_cast<const std::byte*>(ids.data()), sizeof(Id), counts);
}

}  // namespace

TEST_CASE("each distinct row is asked for once in each table") {
  // Feature 0 is looked up in two tables, cut at 4 and at 6; feature 2 in one; feature 1 in none.
  const RowRequests requests(3, {{0, 0, 4}, {0, 6, 10}, {2, 0, 3}, {0, 4, 10}, {0, 0, 6}});
  CHECK(requests.row_bytes() == 4);
  const std::vector<int64_t> ids{9, 2, 9, 5, 0, 2, 77, 77, 1};
  const AskedRows asked = ask(requests, ids, {6, 2, 1});
  // Rows 2 and 0 lie below the first cut, 5 below the second, 9 behind it.
  CHECK(items_of<int64_t>(*asked.numbers) == std::vector<int64_t>{3, 0, 3, 2, 1, 0, 77, 77, 0});
  CHECK(asked.distinct == std::vector<int64_t>{4, 0, 1});
  CHECK(asked.counts == std::vector<int64_t>{2, 1, 1, 2, 3});
  CHECK(asked.first_numbers == std::vector<int64_t>{0, 3, 0, 2, 0});
  CHECK(items_of<int32_t>(*asked.rows) == std::vector<int32_t>{2, 0, 3, 1, 1, 5, 2, 0, 5});
}

TEST_CASE_TEMPLATE("numbers lead to the rows of the ids, in every table", Id, int32_t, int64_t) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const auto draw = [&](int below) { return static_cast<int64_t>(random() % below); };
    const int64_t rows = 1 + draw(40);
    // Two tables in blocks of any size, an empty one among them.
    std::vector<AskedBlock> blocks;
    for (int table = 0; table < 2; ++table) {
      int64_t first = 0;
      while (first < rows) {
        const int64_t end = std::min(rows, first + draw(12));
        blocks.push_back({0, first, end});
        first = end;
      }
    }
    const RowRequests requests(1, blocks);
    std::vector<Id> ids(static_cast<size_t>(draw(60)));
    for (Id& id : ids) id = static_cast<Id>(draw(static_cast<int>(rows)));
    const AskedRows asked = ask(requests, ids, {static_cast<int64_t>(ids.size())});
    const auto numbers = items_of<Id>(*asked.numbers);
    const auto wanted = items_of<int32_t>(*asked.rows);
    CHECK(asked.distinct[0] == static_cast<int64_t>(std::set<Id>(ids.begin(), ids.end()).size()));
    std::map<int64_t, std::vector<int64_t>> row_of;  // by number, of each table that has it
    size_t at = 0;
    for (size_t block = 0; block < blocks.size(); ++block) {
      for (int64_t i = 0; i < asked.counts[block]; ++i) {
        row_of[asked.first_numbers[block] + i].push_back(blocks[block].first + wanted[at++]);
      }
    }
    CHECK(at == wanted.size());
    CHECK(row_of.size() == static_cast<size_t>(asked.distinct[0]));
    for (size_t i = 0; i < ids.size(); ++i) {
      CHECK(row_of[numbers[i]] == std::vector<int64_t>(2, ids[i]));
    }
  }
}

TEST_CASE("rows of large blocks have eight bytes") {
  const int64_t rows = (int64_t{1} << 31) + 5;
  const RowRequests requests(1, {{0, 0, rows}});
  CHECK(requests.row_bytes() == 8);
  const AskedRows asked = ask(requests, std::vector<int64_t>{rows - 1, 0, rows - 1}, {3});
  CHECK(items_of<int64_t>(*asked.rows) == std::vector<int64_t>{rows - 1, 0});
}

TEST_CASE("nothing is asked for a batch without ids") {
  const RowRequests requests(2, {{0, 0, 4}, {1, 0, 4}});
  const AskedRows asked = ask(requests, std::vector<int64_t>{}, {0, 0});
  CHECK(asked.counts == std::vector<int64_t>{0, 0});
  CHECK(asked.distinct == std::vector<int64_t>{0, 0});
  CHECK(asked.rows->bytes == 0);
}

TEST_CASE("ids and blocks that do not fit are refused") {
  const RowRequests requests(1, {{0, 0, 4}});
  for (const int64_t id : {-1, 4}) {
    CHECK_THROWS_AS(ask(requests, std::vector<int64_t>{id}, {1}), std::invalid_argument);
  }
  CHECK_THROWS_AS(ask(requests, std::vector<int64_t>{}, {0, 0}), std::invalid_argument);
  for (const AskedBlock& block : {AskedBlock{1, 0, 4}, AskedBlock{0, 3, 2}, AskedBlock{0, -1, 2}}) {
    CHECK_THROWS_AS(RowRequests(1, {block}), std::invalid_argument);
  }
}
