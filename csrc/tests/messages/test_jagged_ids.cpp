#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "host/instruction_set.h"
#include "messages/ids/jagged_ids.h"
#include "tests/messages/ids_of.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

TEST_CASE("own lengths that are negative or do not add up are a caller's mistake") {
  const auto negative = failure_of([] { values_per_feature(ids_of({1, -1, 2, 0}, {1, 2}, 2)); });
  REQUIRE(negative);
  CHECK_FALSE(negative->kind);
  CHECK(negative->message == "feature 0 has a length that is negative or beyond 32 bits");
  const auto missing = failure_of([] { values_per_feature(ids_of({1, 1, 2, 0}, {1, 2}, 2)); });
  REQUIRE(missing);
  CHECK_FALSE(missing->kind);
  CHECK(missing->message == "the lengths add up to 4 ids, but 2 values were given");
  CHECK(values_per_feature(ids_of({1, 1, 2, 0}, {1, 2, 3, 4}, 2)) == std::vector<int64_t>{2, 2});
}

TEST_CASE("the first id without a row is found with its place") {
  const std::vector<int64_t> rows{10, 3};
  const std::vector<int64_t> counts{2, 2};
  CHECK_FALSE(find_bad_id(ids_of({1, 1, 2, 0}, {9, 0, 2, 0}, 2), rows, counts));
  const auto too_large = find_bad_id(ids_of({1, 1, 2, 0}, {9, 0, 2, 3}, 2), rows, counts);
  REQUIRE(too_large);
  CHECK(too_large->feature == 1);
  CHECK(too_large->position == 1);
  CHECK(too_large->id == 3);
  const auto negative = find_bad_id(ids_of({1, 1, 2, 0}, {9, -1, 2, 3}, 2), rows, counts);
  REQUIRE(negative);
  CHECK(negative->feature == 0);
  CHECK(negative->position == 1);
  CHECK(negative->id == -1);
}

TEST_CASE_TEMPLATE("ids at the ends of what a dtype holds", Id, int32_t, int64_t) {
  const Id least = std::numeric_limits<Id>::min(), most = std::numeric_limits<Id>::max();
  const auto largest = static_cast<int64_t>(most);
  const std::vector<int64_t> limits{0,
                                    1,
                                    5,
                                    largest - 1,
                                    largest,
                                    int64_t{1} << 31,
                                    (int64_t{1} << 32) + 1,
                                    std::numeric_limits<int64_t>::max()};
  for (const int64_t limit : limits) {
    for (const Id id : {least, Id{-1}, Id{0}, Id{1}, Id{4}, Id{5}, Id(most - 1), most}) {
      CAPTURE(limit);
      CAPTURE(id);
      // Also behind ids that fill whole vectors.
      for (const size_t before : {0u, 16u, 37u}) {
        std::vector<Id> values(before, limit > 0 ? Id{0} : id);
        values.push_back(id);
        JaggedIds ids;
        ids.values = reinterpret_cast<const std::byte*>(values.data());
        ids.value_bytes = sizeof(Id);
        ids.features = 1;
        const std::vector<int64_t> rows{limit}, counts{static_cast<int64_t>(values.size())};
        const bool outside = id < 0 || static_cast<int64_t>(id) >= limit;
        const auto bad = find_bad_id(ids, rows, counts);
        REQUIRE(bad.has_value() == outside);
        if (outside) CHECK(bad->id == static_cast<int64_t>(id));
        if (outside && limit > 0) CHECK(bad->position == static_cast<int64_t>(before));
      }
    }
  }
}

TEST_CASE_TEMPLATE("the largest id is known unless one does not fit 31 bits", Id, int32_t,
                   int64_t) {
  const std::string_view best = instruction_sets().back();
  for (const std::string_view set : instruction_sets()) {
    use_instruction_set(set);
    for (const size_t count : {0u, 1u, 2u, 7u, 8u, 33u}) {
      for (size_t place = 0; place < std::max<size_t>(count, 1); ++place) {
        for (const int64_t extreme :
             {int64_t{3}, int64_t{4}, int64_t{500}, int64_t{INT32_MAX}, int64_t{-1},
              int64_t{INT32_MIN}, int64_t{INT32_MAX} + 1, int64_t{1} << 32, int64_t{7} << 40,
              std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
          if (static_cast<Id>(extreme) != extreme) continue;
          CAPTURE(set);
          CAPTURE(count);
          CAPTURE(place);
          CAPTURE(extreme);
          std::vector<Id> ids(count, Id{3});
          if (count > 0) ids[place] = static_cast<Id>(extreme);
          const bool known = extreme >= 0 && extreme <= INT32_MAX;
          const int64_t most = count < 2 ? extreme : std::max<int64_t>(extreme, 3);
          const int64_t expected = count == 0 ? 0 : known ? most : kUnknownId;
          CHECK(largest_id(reinterpret_cast<const std::byte*>(ids.data()), count, sizeof(Id)) ==
                expected);
        }
      }
    }
  }
  use_instruction_set(best);
}
