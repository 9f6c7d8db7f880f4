#include <doctest/doctest.h>

#include <limits>
#include <vector>

#include "messages/frame_message.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr int kRanks = 3;
constexpr size_t kColumns = 20;
constexpr size_t kRows = 6;

/// Rows of two tables, side by side, for one rank.
using Values = std::vector<float>;

/// What `source` has for `destination`. Every 85th step of a grid of 255, which two and eight bits
/// have without loss; `escaped` rows that have none.
Values values_of(int source, int destination, size_t escaped) {
  Values values(kRows * kColumns);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(source * 3 + destination + 85 * static_cast<int>(i % 4));
  }
  for (size_t row = 0; row < escaped; ++row) {
    values[row * kColumns] = std::numeric_limits<float>::infinity();
  }
  return values;
}

template <typename T>
std::vector<FrameTable<T>> tables_of(T* values) {
  return {{Codec::kUint2, {values, kRows, 8, kColumns}},
          {Codec::kUint8, {values + 8, kRows, kColumns - 8, kColumns}}};
}

template <typename T, typename Memory>
std::vector<std::vector<FrameTable<T>>> frames_over(Memory& of_ranks) {
  std::vector<std::vector<FrameTable<T>>> frames;
  for (auto& values : of_ranks) frames.push_back(tables_of<T>(values.data()));
  return frames;
}

template <typename T>
std::vector<std::span<const FrameTable<T>>> spans_of(
    const std::vector<std::vector<FrameTable<T>>>& frames) {
  return {frames.begin(), frames.end()};
}

void post(Channel& channel, size_t escaped) {
  std::vector<Values> values;
  for (int rank = 0; rank < kRanks; ++rank) {
    values.push_back(values_of(channel.config().rank, rank, escaped));
  }
  const auto frames = frames_over<const float>(values);
  post_frames(channel, spans_of(frames));
}

std::vector<Values> collect(const Arrival& arrival) {
  std::vector<Values> values(kRanks, Values(kRows * kColumns));
  const auto frames = frames_over<float>(values);
  collect_frames(arrival, spans_of(frames));
  return values;
}

}  // namespace

TEST_CASE("encoded rows of all ranks arrive, whether their frames fit the slots or not") {
  const size_t usual = kFrameHeaderBytes + 2 * kFrameTableBytes + kRows * (8 + 2 + 8 + 12);
  Ranks ranks({.world_size = kRanks, .slot_bytes = 64 + usual});
  ranks.run([](int rank, Channel& channel) {
    for (const size_t escaped : {0, 3, 0, 6}) {
      post(channel, escaped);
      const std::vector<Values> arrived = collect(channel.wait());
      for (int source = 0; source < kRanks; ++source) {
        expect(arrived[static_cast<size_t>(source)] == values_of(source, rank, escaped), "rows");
      }
      channel.release();
    }
  });
  CHECK(ranks[0].stats().pulled_messages == 2 * (kRanks - 1));
  CHECK(ranks[0].stats().bytes == (kRanks - 1) * (4 * usual + (3 * 8 + 6 * 8) * sizeof(float)));
}

TEST_CASE("a frame that is no frame, or of other codecs, is refused with the rank that sent it") {
  Ranks ranks({.world_size = kRanks});
  post(ranks[0], 0);
  post(ranks[1], 0);
  Outgoing outgoing(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) outgoing.add(rank, bytes_of("no frame"));
  ranks[2].post(outgoing.messages());
  const Arrival& arrival = ranks[0].wait();
  const auto told = failure_of([&] { collect(arrival); });
  REQUIRE(told);
  CHECK(told->kind == ErrorKind::kProtocol);
  CHECK_MESSAGE(told->message.find("from rank 2, the frame of encoded rows has 8 bytes") == 0,
                told->message);

  std::vector<Values> values(kRanks, Values(kRows * kColumns));
  auto frames = frames_over<float>(values);
  frames[1][1].codec = Codec::kUint4;
  const auto other = failure_of([&] { collect_frames(arrival, spans_of(frames)); });
  REQUIRE(other);
  CHECK_MESSAGE(other->message.find("from rank 1, ") == 0, other->message);
  CHECK_MESSAGE(other->message.find("codec 3, expected 4") != std::string::npos, other->message);
}

TEST_CASE("frames for another number of ranks are refused") {
  Ranks ranks({});
  CHECK(failure_of([&] { post_frames(ranks[0], {}); }));
}
