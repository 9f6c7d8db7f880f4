#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "lookup/table_rows.h"
#include "tests/lookup/bytes.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr int64_t kRows = 10;
constexpr size_t kFloats = 3;
constexpr size_t kRowBytes = kFloats * sizeof(float);

/// A table whose values tell rank, feature and row.
std::vector<float> table_of(int rank, size_t feature) {
  std::vector<float> table;
  for (int64_t row = 0; row < kRows; ++row) {
    const auto value = static_cast<float>(rank * 1000 + static_cast<int>(feature * 100 + row));
    table.insert(table.end(), kFloats, value);
  }
  return table;
}

/// What `asking` wants from `holding`: ids of a feature.
std::vector<int64_t> ids_for(int holding, size_t feature, int asking) {
  std::vector<int64_t> ids((static_cast<size_t>(holding + 2 * asking) + feature) % 4);
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int64_t>(i * 3 + feature + static_cast<size_t>(asking)) % kRows;
  }
  return ids;
}

std::vector<float> rows_for(int holding, size_t features, int asking) {
  std::vector<float> rows;
  for (size_t feature = 0; feature < features; ++feature) {
    const std::vector<float> table = table_of(holding, feature);
    for (const int64_t id : ids_for(holding, feature, asking)) {
      const auto row = table.begin() + id * static_cast<int64_t>(kFloats);
      rows.insert(rows.end(), row, row + kFloats);
    }
  }
  return rows;
}

}  // namespace

TEST_CASE("rows reach their ranks straight from the tables") {
  constexpr int kWorld = 3;
  const int order[] = {2, 0, 1};
  Ranks ranks({.world_size = kWorld, .slot_bytes = 1024});
  ranks.run([&](int rank, Channel& channel) {
    // As in sharding: ranks hold different numbers of tables, the last one none.
    const auto features = [](int holding) { return static_cast<size_t>(2 - holding); };
    std::vector<std::vector<float>> data;
    std::vector<Table> tables;
    std::vector<int64_t> ids;
    std::vector<int64_t> counts;
    for (size_t feature = 0; feature < features(rank); ++feature) {
      data.push_back(table_of(rank, feature));
      tables.push_back({bytes(data.back().data()), kRows, kRowBytes});
      for (const int asking : order) {
        const std::vector<int64_t> more = ids_for(rank, feature, asking);
        ids.insert(ids.end(), more.begin(), more.end());
        counts.push_back(static_cast<int64_t>(more.size()));
      }
    }
    const std::vector<float> expected_own = rows_for(rank, features(rank), rank);
    std::vector<float> own(expected_own.size());
    post_table_rows(
        channel,
        {{tables, bytes(ids.data()), sizeof(int64_t), ids.size()}, {kRowBytes, counts, order}},
        reinterpret_cast<std::byte*>(own.data()));
    CHECK(own == expected_own);
    const Arrival& arrival = channel.wait();
    CHECK(arrival.parts(rank).empty());
    for (int source = 0; source < kWorld; ++source) {
      if (source == rank) continue;
      const std::vector<float> expected = rows_for(source, features(source), rank);
      const View& part = arrival.part(source, 0);
      REQUIRE(part.bytes == expected.size() * sizeof(float));
      const auto* found = reinterpret_cast<const float*>(part.data);
      CHECK(std::vector<float>(found, found + expected.size()) == expected);
    }
    channel.release();
  });
}

TEST_CASE_TEMPLATE("rows of any size", Id, int32_t, int64_t) {
  const int order[] = {0};
  // Sizes with and without a copy of their own, and more rows than are fetched ahead.
  for (const size_t row_bytes : {3, 64, 128, 256, 512, 1000}) {
    std::vector<std::byte> data(20 * row_bytes);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + i / 256);
    const Table tables[] = {{data.data(), 20, row_bytes}};
    for (const size_t count : {0, 1, 8, 9, 31}) {
      std::vector<Id> ids;
      std::vector<std::byte> expected;
      for (size_t i = 0; i < count; ++i) {
        ids.push_back(static_cast<Id>(i * 13 % 20));
        const auto row = data.begin() + static_cast<ptrdiff_t>(ids.back() * row_bytes);
        expected.insert(expected.end(), row, row + static_cast<ptrdiff_t>(row_bytes));
      }
      Ranks ranks({.world_size = 1});
      std::vector<std::byte> own(expected.size());
      const int64_t counts[] = {static_cast<int64_t>(count)};
      post_table_rows(
          ranks[0],
          {{tables, bytes(ids.data()), sizeof(Id), ids.size()}, {row_bytes, counts, order}},
          own.data());
      CHECK(own == expected);
    }
  }
}

TEST_CASE("an id that a table does not have is refused before anything is posted") {
  Ranks ranks({.slot_bytes = 1024});
  const std::vector<float> data = table_of(0, 0);
  const Table tables[] = {{bytes(data.data()), kRows, kRowBytes},
                          {bytes(data.data()), 4, kRowBytes}};
  const int order[] = {0, 1};
  const int64_t counts[] = {1, 1, 1, 1};
  std::vector<float> own(2 * kFloats);
  for (const int32_t bad : {4, -1}) {
    const int32_t ids[] = {9, 0, 3, bad};
    std::string message;
    try {
      post_table_rows(ranks[0],
                      {{tables, bytes(ids), sizeof(int32_t), 4}, {kRowBytes, counts, order}},
                      reinterpret_cast<std::byte*>(own.data()));
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    CHECK(message ==
          "id " + std::to_string(bad) + " of feature 1 of the lookup, whose table has 4 rows here");
    CHECK(ranks[0].posted() == 0);
  }
}

TEST_CASE("groups that do not fit the ids are refused before anything is posted") {
  Ranks ranks({.slot_bytes = 1024});
  const std::vector<float> data = table_of(0, 0);
  const Table tables[] = {{bytes(data.data()), kRows, kRowBytes}};
  const int order[] = {0, 1};
  const int64_t counts[] = {2, 1};
  const int64_t ids[] = {1, 2};
  std::vector<float> own(2 * kFloats);
  CHECK_THROWS_WITH_AS(
      post_table_rows(ranks[0],
                      {{tables, bytes(ids), sizeof(int64_t), 2}, {kRowBytes, counts, order}},
                      reinterpret_cast<std::byte*>(own.data())),
      "the lookup is of 3 ids, but 2 were given", std::invalid_argument);
  CHECK(ranks[0].posted() == 0);
}

TEST_CASE("the rows of all ids go to one place") {
  const float first[] = {1, 2, 3}, second[] = {10, 20};
  const Table tables[] = {{bytes(first), 3, 4}, {bytes(second), 2, 4}};
  const int order[] = {0, 1};
  const int64_t counts[] = {4, 0, 1, 3}, ids[] = {2, 2, 0, 2, 1, 0, 1, 1};
  std::vector<float> out(8, -1);
  copy_table_rows({{tables, bytes(ids), 8, 8}, {4, counts, order}},
                  reinterpret_cast<std::byte*>(out.data()));
  CHECK(out == std::vector<float>{3, 3, 1, 3, 20, 10, 20, 20});
}

TEST_CASE("stored rows travel without their padding, to their own rank as well") {
  const int order[] = {1, 0};
  Ranks ranks({.slot_bytes = 1024});
  ranks.run([&](int rank, Channel& channel) {
    // Rows of 3 bytes in 8, and of 5 in 5.
    std::vector<std::byte> padded(4 * 8), dense(4 * 5);
    for (size_t i = 0; i < padded.size(); ++i) padded[i] = std::byte(100 * rank + i);
    for (size_t i = 0; i < dense.size(); ++i) dense[i] = std::byte(100 * rank + 40 + i);
    const Table tables[] = {{padded.data(), 4, 3, false, 8}, {dense.data(), 4, 5, false, 5}};
    const int32_t ids[] = {3, 0, 2, 1};
    const int64_t counts[] = {1, 2, 0, 1};  // by feature; rank 1 first
    post_stored_rows(channel, {{tables, bytes(ids), sizeof(int32_t), 4}, {0, counts, order}});
    const Arrival& arrival = channel.wait();
    for (int source = 0; source < 2; ++source) {
      const int at = 100 * source;
      const std::vector<int> expected =
          rank == 1 ? std::vector<int>{at + 24, at + 25, at + 26}
                    : std::vector<int>{at,      at + 1,  at + 2,  at + 16, at + 17, at + 18,
                                       at + 45, at + 46, at + 47, at + 48, at + 49};
      const View& part = arrival.part(source, 0);
      std::vector<int> found;
      for (size_t i = 0; i < part.bytes; ++i) found.push_back(std::to_integer<int>(part.data[i]));
      CHECK(found == expected);
    }
    channel.release();
  });
}
