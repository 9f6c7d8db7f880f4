#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

#include "lookup/pooled_rows.h"
#include "tests/lookup/bytes.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {}  // namespace

TEST_CASE_TEMPLATE("each rank gets the sums of its samples, feature by feature", Id, int32_t,
                   int64_t) {
  constexpr int kWorld = 3;
  const int order[] = {2, 0, 1};
  const int64_t batches[] = {4, 0, 3};  // by place
  const size_t floats[] = {2, 5};
  Ranks ranks({.world_size = kWorld, .slot_bytes = 1024});
  std::vector<std::vector<std::vector<float>>> expected(kWorld);  // [holding][asking]
  std::vector<std::vector<std::vector<float>>> data(kWorld);
  std::vector<std::vector<Table>> tables(kWorld);
  std::vector<std::vector<Id>> ids(kWorld);
  std::vector<std::vector<Id>> lengths(kWorld);
  std::mt19937 random(7);
  for (size_t holding = 0; holding < kWorld; ++holding) {
    const size_t features = 2 - holding;  // the last rank has no tables
    for (size_t feature = 0; feature < features; ++feature) {
      data[holding].emplace_back();
      for (size_t i = 0; i < 10 * floats[feature]; ++i) {
        data[holding].back().push_back(static_cast<float>(random()) * 1e-3F - 1e6F);
      }
    }
    size_t columns = 0;
    for (size_t feature = 0; feature < features; ++feature) {
      tables[holding].push_back(
          {bytes(data[holding][feature].data()), 10, floats[feature] * sizeof(float)});
      columns += floats[feature];
    }
    expected[holding].resize(kWorld);
    for (size_t place = 0; place < kWorld; ++place) {
      expected[holding][static_cast<size_t>(order[place])].resize(
          static_cast<size_t>(batches[place]) * columns);
    }
    size_t column = 0;
    for (size_t feature = 0; feature < features; ++feature) {
      for (size_t place = 0; place < kWorld; ++place) {
        auto& sums = expected[holding][static_cast<size_t>(order[place])];
        for (size_t sample = 0; sample < static_cast<size_t>(batches[place]); ++sample) {
          lengths[holding].push_back(static_cast<Id>(random() % 12));
          for (Id i = 0; i < lengths[holding].back(); ++i) {
            ids[holding].push_back(static_cast<Id>(random() % 10));
            for (size_t k = 0; k < floats[feature]; ++k) {
              sums[sample * columns + column + k] +=
                  data[holding][feature]
                      [static_cast<size_t>(ids[holding].back()) * floats[feature] + k];
            }
          }
        }
      }
      column += floats[feature];
    }
  }
  ranks.run([&](int rank, Channel& channel) {
    const auto r = static_cast<size_t>(rank);
    post_pooled_rows(channel, {{tables[r], bytes(ids[r].data()), sizeof(Id), ids[r].size()},
                               bytes(lengths[r].data()),
                               sizeof(Id),
                               lengths[r].size(),
                               nullptr,
                               batches,
                               order});
    const Arrival& arrival = channel.wait();
    for (int source = 0; source < kWorld; ++source) {
      const std::vector<float>& sums = expected[static_cast<size_t>(source)][r];
      const View& part = arrival.part(source, 0);
      REQUIRE(part.bytes == sums.size() * sizeof(float));
      const auto* found = reinterpret_cast<const float*>(part.data);
      CHECK(std::vector<float>(found, found + sums.size()) == sums);
    }
    channel.release();
  });
}

TEST_CASE("sums of this rank itself go where it wants them, others into slots") {
  Ranks ranks({.slot_bytes = 1024});
  const float data[] = {1, 2, 3, 4};
  const Table tables[] = {{bytes(data), 2, 8, true}};
  const int order[] = {1, 0};
  const int64_t batches[] = {1, 2};  // of rank 1, then of rank 0
  const int64_t lengths[] = {2, 1, 0}, ids[] = {0, 1, 1};
  const float weights[] = {2, 4, 10};
  std::vector<float> own(6, -1);
  post_pooled_rows(ranks[0],
                   {{tables, bytes(ids), 8, 3}, bytes(lengths), 8, 3, weights, batches, order},
                   {reinterpret_cast<std::byte*>(own.data() + 1), 12});
  CHECK(own == std::vector<float>{-1, 30, 40, -1, 0, 0});
  post_pooled_rows(ranks[1], {{{}, nullptr, 8, 0}, nullptr, 8, 0, nullptr, batches, order});
  const View& part = ranks[1].wait().part(0, 0);
  REQUIRE(part.bytes == 8);
  const auto* sums = reinterpret_cast<const float*>(part.data);
  CHECK(sums[0] == (1 * 2 + 3 * 4) / 2);
  CHECK(sums[1] == (2 * 2 + 4 * 4) / 2);
  CHECK(ranks[0].wait().parts(0).empty());
}

TEST_CASE("ids and lengths that do not fit are refused before anything is posted") {
  Ranks ranks({.slot_bytes = 1024});
  const std::vector<float> data(20);
  const Table tables[] = {{bytes(data.data()), 10, 8}, {bytes(data.data()), 4, 8}};
  const int order[] = {0, 1};
  const int64_t batches[] = {1, 1};
  const auto refusal = [&](const std::vector<int64_t>& lengths, const std::vector<int64_t>& ids) {
    try {
      post_pooled_rows(ranks[0], {{tables, bytes(ids.data()), 8, ids.size()},
                                  bytes(lengths.data()),
                                  8,
                                  lengths.size(),
                                  nullptr,
                                  batches,
                                  order});
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refusal({1, 0, 0, 1}, {9, 4}) ==
        "id 4 of feature 1 of the lookup, whose table has 4 rows here");
  CHECK(refusal({1, 0, 0, 2}, {9, 3}).find("length") != std::string::npos);
  CHECK(refusal({1, -1, 1, 1}, {9, 3}).find("length") != std::string::npos);
  CHECK(refusal({1, 0, 1}, {9, 3}) == "3 lengths for 2 features of 2 samples");
  CHECK(ranks[0].posted() == 0);
}

TEST_CASE("all sums go to one place, samples one behind the other") {
  const float first[] = {1, 2, 3, 4}, second[] = {10, 20, 30};
  const Table tables[] = {{bytes(first), 2, 8}, {bytes(second), 3, 4}};
  const int order[] = {1, 0};
  const int64_t batches[] = {3, 1};
  const int64_t lengths[] = {2, 2, 1, 0, 1, 1, 1, 2}, ids[] = {0, 1, 0, 1, 1, 2, 0, 2, 1, 1};
  const PooledRows rows{{tables, bytes(ids), 8, 10}, bytes(lengths), 8, 8, nullptr, batches, order};
  std::vector<float> out(12, -1);
  sum_rows(rows, reinterpret_cast<std::byte*>(out.data()));
  CHECK(out == std::vector<float>{4, 6, 30, 4, 6, 10, 3, 4, 30, 0, 0, 40});
}
