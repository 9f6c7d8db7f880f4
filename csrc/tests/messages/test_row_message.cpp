#include <doctest/doctest.h>

#include <cstring>

#include "messages/rows/row_message.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

std::byte* bytes(std::vector<float>& floats) { return reinterpret_cast<std::byte*>(floats.data()); }

/// Rank r's rows for (feature, destination): values that tell them all apart.
float row_value(int source, size_t feature, int destination, int64_t row) {
  return static_cast<float>(source * 1000 + destination * 100 + static_cast<int>(feature) * 10 +
                            static_cast<int>(row));
}

/// Rows that `source` has for `destination` in a feature; some have none.
int64_t row_count(int source, size_t feature, int destination) {
  return static_cast<int64_t>((static_cast<size_t>(source + 2 * destination) + feature) % 4);
}

/// One message with `values` from rank 1 and one with `own` from rank 0, as rank 0 sees them.
class TwoSenders {
 public:
  TwoSenders(std::vector<float> own, std::vector<float> values)
      : ranks_({.slot_bytes = 1024}), outgoing_(2) {
    Outgoing other(2);
    outgoing_.add(0, {bytes(own), bytes(own) + own.size() * 4});
    other.add(0, {bytes(values), bytes(values) + values.size() * 4});
    ranks_[0].post(outgoing_.messages());
    ranks_[1].post(other.messages());
    arrival_ = &ranks_[0].wait();
  }
  const Arrival& arrival() const { return *arrival_; }

 private:
  Ranks ranks_;
  Outgoing outgoing_;
  const Arrival* arrival_;
};

void check_refused(const std::optional<Failure>& failure, const std::string& text) {
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK_MESSAGE(failure->message.find(text) == 0, failure->message);
}

}  // namespace

TEST_CASE("grouped rows reach their ranks feature by feature") {
  constexpr int world_size = 3;
  constexpr size_t features = 4;
  const int order[] = {2, 0, 1};
  Ranks ranks({.world_size = world_size, .slot_bytes = 1024});
  ranks.run([&](int rank, Channel& channel) {
    std::vector<int64_t> counts;
    std::vector<float> rows;
    for (size_t feature = 0; feature < features; ++feature) {
      for (const int destination : order) {
        counts.push_back(row_count(rank, feature, destination));
        for (int64_t row = 0; row < counts.back(); ++row) {
          rows.insert(rows.end(), 2, row_value(rank, feature, destination, row));
        }
      }
    }
    post_grouped_rows(channel, bytes(rows), {8, counts, order});
    const Arrival& arrival = channel.wait();

    std::vector<float> expected;
    std::vector<int64_t> rows_per_source;
    for (int source = 0; source < world_size; ++source) {
      const size_t before = expected.size();
      for (size_t feature = 0; feature < features; ++feature) {
        for (int64_t row = 0; row < row_count(source, feature, rank); ++row) {
          expected.insert(expected.end(), 2, row_value(source, feature, rank, row));
        }
      }
      rows_per_source.push_back(static_cast<int64_t>((expected.size() - before) / 2));
    }
    std::vector<float> got(expected.size());
    collect_rows(arrival, bytes(got), 8, rows_per_source, {});
    expect(got == expected, "rows by source");

    std::vector<int64_t> reversed;
    std::vector<float> backwards;
    for (auto row = static_cast<int64_t>(expected.size() / 2) - 1; row >= 0; --row) {
      reversed.push_back(row);
      backwards.insert(backwards.end(), 2, expected[static_cast<size_t>(row) * 2]);
    }
    collect_rows(arrival, bytes(got), 8, rows_per_source, reversed);
    expect(got == backwards, "permuted rows");
    channel.release();

    // The same with this rank's own rows read where they are.
    const GroupedRows grouped{8, counts, order};
    post_grouped_rows(channel, bytes(rows), grouped, false);
    const Arrival& others = channel.wait();
    expect(others.parts(rank).empty(), "no message to itself");
    const OwnRows own{rank, bytes(rows), grouped};
    collect_rows(others, bytes(got), 8, rows_per_source, {}, own);
    expect(got == expected, "rows by source, own in place");
    collect_rows(others, bytes(got), 8, rows_per_source, reversed, own);
    expect(got == backwards, "permuted rows, own in place");
    ++rows_per_source[static_cast<size_t>(rank)];
    const auto failure =
        failure_of([&] { collect_rows(others, bytes(got), 8, rows_per_source, {}, own); });
    expect(failure && failure->message.find("rows of this rank") != std::string::npos,
           "another number of own rows is refused");
    channel.release();
  });
}

TEST_CASE("collecting grouped rows undoes posting them") {
  constexpr int world_size = 3;
  const int order[] = {1, 2, 0};
  Ranks ranks({.world_size = world_size, .slot_bytes = 1024});
  ranks.run([&](int rank, Channel& channel) {
    const int64_t there[] = {2, 0, 1, 1, 3, 0};  // [feature][place in order], the same on all ranks
    std::vector<float> rows(7);
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<float>(100 * rank) + static_cast<float>(i);
    }
    post_grouped_rows(channel, bytes(rows), {4, there, order});
    Outgoing back(world_size);
    const Arrival& arrival = channel.wait();
    for (int source = 0; source < world_size; ++source) {
      const View& part = arrival.part(source, 0);
      back.add(source, {part.data, part.data + part.bytes});
    }
    channel.release();
    channel.post(back.messages());
    std::vector<float> got(rows.size());
    collect_grouped_rows(channel.wait(), bytes(got), {4, there, order});
    expect(got == rows, "rows that went and came back");
    channel.release();
  });
}

TEST_CASE("grouped rows of no feature are an empty message") {
  Ranks ranks({});
  const int order[] = {0, 1};
  for (int rank = 0; rank < 2; ++rank) post_grouped_rows(ranks[rank], nullptr, {4, {}, order});
  const Arrival& arrival = ranks[0].wait();
  CHECK(arrival.part(1, 0).bytes == 0);
  collect_grouped_rows(arrival, nullptr, {4, {}, order});
}

TEST_CASE("columns of several ranks are added in the order of the ranks") {
  // In fp32 the order shows: (1e8 - 1e8) + 1 is 1, (1 + 1e8) - 1e8 is 0.
  constexpr int world_size = 3;
  const float partial[] = {1e8f, -1e8f, 1.0f};
  Ranks ranks({.world_size = world_size});
  ranks.run([&](int rank, Channel& channel) {
    const Bytes row(reinterpret_cast<const std::byte*>(&partial[rank]),
                    reinterpret_cast<const std::byte*>(&partial[rank] + 1));
    Outgoing outgoing(world_size);
    for (int peer = 0; peer < world_size; ++peer) outgoing.add(peer, row);
    channel.post(outgoing.messages());
    float sum = -1;
    const ColumnGroup group{0, 3, 0, 4};
    collect_columns(channel.wait(), reinterpret_cast<std::byte*>(&sum), 1, 4, {&group, 1});
    expect(sum == 1.0f, "sum " + std::to_string(sum));
    channel.release();
  });
}

TEST_CASE("columns land where their group says, row by row") {
  const TwoSenders senders({1, 2, 3, 4}, {10, 20});
  const ColumnGroup groups[] = {{0, 1, 0, 8}, {1, 1, 12, 4}};
  std::vector<float> out(8, -1);
  collect_columns(senders.arrival(), bytes(out), 2, 16, groups);
  CHECK(out == std::vector<float>{1, 2, -1, 10, 3, 4, -1, 20});
}

TEST_CASE("embeddings of another size are refused with the rank that sent them") {
  const TwoSenders senders({1}, {10, 20, 30});
  std::vector<float> out(8);
  const int64_t rows[] = {1, 2};
  const int order[] = {0, 1};
  const std::string text = "embeddings from rank 1 do not fit: 12 bytes instead of 8";
  check_refused(failure_of([&] { collect_rows(senders.arrival(), bytes(out), 4, rows, {}); }),
                text);
  check_refused(failure_of([&] {
                  collect_grouped_rows(senders.arrival(), bytes(out), {4, rows, order});
                }),
                text);
  const ColumnGroup group{1, 1, 0, 8};
  check_refused(failure_of([&] {
                  collect_columns(senders.arrival(), bytes(out), 1, 8, {&group, 1});
                }),
                text);
}

TEST_CASE("a permutation beyond the rows is refused") {
  const TwoSenders senders({1}, {10});
  std::vector<float> out(2);
  const int64_t rows[] = {1, 1};
  for (const int64_t wrong : {int64_t{2}, int64_t{-1}}) {
    const int64_t permutation[] = {0, wrong};
    const auto failure =
        failure_of([&] { collect_rows(senders.arrival(), bytes(out), 4, rows, permutation); });
    REQUIRE(failure);
    CHECK_FALSE(failure->kind);
    CHECK(failure->message == "permutation index " + std::to_string(wrong) + " of 2 rows");
  }
}

TEST_CASE("rows go to their places, with zeros between them") {
  const TwoSenders senders({1, 2, 3}, {10, 20});
  // Of rank 0 two rows of 4 bytes, 8 apart, and one of 4; of rank 1 one row of 8.
  const PlacedRows placed[] = {{8, 2, 4, 8}, {0, 1, 4, 4}, {0, 0, 4, 0}, {24, 1, 8, 8}};
  const size_t blocks[] = {2, 2};
  std::vector<float> out(8, -1);
  collect_placed_rows(senders.arrival(), bytes(out), 32, placed, blocks);
  CHECK(out == std::vector<float>{3, -1, 1, 0, 2, 0, 10, 20});
}

TEST_CASE("places that do not fit the output or the messages are refused") {
  const TwoSenders senders({1, 2}, {10});
  std::vector<float> out(4);
  const auto failure = [&](std::vector<PlacedRows> placed, std::vector<size_t> blocks) {
    return failure_of(
        [&] { collect_placed_rows(senders.arrival(), bytes(out), 16, placed, blocks); });
  };
  for (const PlacedRows& place :
       {PlacedRows{0, 2, 4, 12}, PlacedRows{20, 2, 4, 4}, PlacedRows{0, 2, 4, 2}}) {
    const auto refused = failure({place}, {1});
    REQUIRE(refused);
    CHECK_FALSE(refused->kind);
    CHECK(refused->message.find("2 rows of 4 bytes") == 0);
  }
  CHECK(failure({{0, 1, 4, 4}}, {2})->message == "rank 0 sends more blocks than 1 that are left");
  check_refused(failure({{0, 2, 4, 4}, {8, 2, 4, 4}}, {1, 1}),
                "embeddings from rank 1 do not fit: 4 bytes instead of 8");
}
