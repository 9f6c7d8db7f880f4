#include <doctest/doctest.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "messages/all_reduce.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// What `rank` adds to float `index` in `call`: of many magnitudes.
float term(int rank, size_t index, int call) {
  const int seed = rank * 7 + call * 13 + static_cast<int>(index % 1009) * 31;
  return std::ldexp(static_cast<float>(seed % 97) - 40, seed % 23 - 11);
}

float sum(int world_size, size_t index, int call) {
  double sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += term(rank, index, call);
  return static_cast<float>(sum);
}

Setup setup_of(int world_size, size_t slot_bytes) {
  return {.world_size = world_size, .bound = kAllReducePosts - 1, .slot_bytes = slot_bytes};
}

void reduce_floats(Channel& channel, std::vector<float>& floats) {
  all_reduce(channel, Element::kFloat32, Reduction::kSum,
             reinterpret_cast<std::byte*>(floats.data()), floats.size());
}

/// Sums of all `counts` of floats, one after the other and all again.
void check_sums(int world_size, size_t slot_bytes, const std::vector<size_t>& counts) {
  Ranks ranks(setup_of(world_size, slot_bytes));
  REQUIRE_NOTHROW(ranks.run([&](int rank, Channel& channel) {
    for (int call = 0; call < 2 * static_cast<int>(counts.size()); ++call) {
      const size_t count = counts[static_cast<size_t>(call) % counts.size()];
      std::vector<float> floats;
      for (size_t i = 0; i < count; ++i) floats.push_back(term(rank, i, call));
      reduce_floats(channel, floats);
      for (size_t i = 0; i < count; ++i) expect(floats[i] == sum(world_size, i, call), "sum");
    }
    expect(channel.pulled_messages() == 0, "all messages stand in their slots");
  }));
}

/// What each rank raises that reduces what `call` does.
std::vector<std::optional<Failure>> failures_of(
    const std::function<void(int rank, Channel& channel)>& call) {
  Ranks ranks(setup_of(3, 1024));
  return ranks.outcomes(call);
}

}  // namespace

TEST_CASE("all ranks have the sums of all, of one segment and of many") {
  for (const int world_size : {1, 2, 3, 4, 8}) {
    // Less than one float a rank, uneven chunks, a last segment with a few floats, many segments.
    check_sums(world_size, 1024, {1, 0, 5, 129, 130, 1000, 20011});
    check_sums(world_size, 64 << 10, {4096, 4097, 70001});
  }
}

TEST_CASE("elements of other sizes") {
  Ranks ranks(setup_of(3, 1024));
  REQUIRE_NOTHROW(ranks.run([](int rank, Channel& channel) {
    std::vector<int64_t> longs(1003);
    for (size_t i = 0; i < longs.size(); ++i) longs[i] = static_cast<int64_t>(i) << (20 * rank);
    all_reduce(channel, Element::kInt64, Reduction::kMax,
               reinterpret_cast<std::byte*>(longs.data()), longs.size());
    for (size_t i = 0; i < longs.size(); ++i) {
      expect(longs[i] == static_cast<int64_t>(i) << 40, "largest");
    }
    std::vector<uint16_t> halves(1003, 0x3c00);  // ones
    all_reduce(channel, Element::kFloat16, Reduction::kAverage,
               reinterpret_cast<std::byte*>(halves.data()), halves.size());
    expect(halves == std::vector<uint16_t>(1003, 0x3c00), "average");
  }));
}

TEST_CASE("ranks that reduce something else are named, and nothing is written") {
  const auto outcomes = failures_of([](int rank, Channel& channel) {
    std::vector<float> floats(rank == 1 ? 2000 : 2001, 1);
    try {
      reduce_floats(channel, floats);
    } catch (...) {
      expect(floats == std::vector<float>(floats.size(), 1), "nothing is written");
      throw;
    }
  });
  size_t named = 0;
  for (const auto& outcome : outcomes) {
    REQUIRE(outcome);
    CHECK((outcome->kind == ErrorKind::kProtocol || outcome->kind == ErrorKind::kPoisoned));
    named += outcome->message.find("2000 x float32 by SUM") != std::string::npos &&
             outcome->message.find("2001 x float32 by SUM") != std::string::npos;
  }
  CHECK(named > 0);
}

TEST_CASE("elements and reductions that differ are named") {
  const auto elements = failures_of([](int rank, Channel& channel) {
    std::vector<double> doubles(100);
    all_reduce(channel, rank == 2 ? Element::kFloat64 : Element::kFloat32, Reduction::kSum,
               reinterpret_cast<std::byte*>(doubles.data()), doubles.size());
  });
  const auto reductions = failures_of([](int rank, Channel& channel) {
    std::vector<float> floats(100);
    all_reduce(channel, Element::kFloat32, rank == 2 ? Reduction::kMin : Reduction::kMax,
               reinterpret_cast<std::byte*>(floats.data()), floats.size());
  });
  const auto told = [](const std::vector<std::optional<Failure>>& outcomes, const char* text) {
    return std::any_of(outcomes.begin(), outcomes.end(), [&](const auto& outcome) {
      return outcome && outcome->message.find(text) != std::string::npos;
    });
  };
  CHECK(told(elements, "100 x float64 by SUM"));
  CHECK(told(reductions, "100 x float32 by MIN"));
}

TEST_CASE("a message of something else is refused") {
  const auto outcomes = failures_of([](int rank, Channel& channel) {
    std::vector<float> floats(10);
    if (rank == 0) {
      const std::vector<Message> nothing(3);
      channel.post(nothing);
      channel.wait();
      return;
    }
    reduce_floats(channel, floats);
  });
  REQUIRE(outcomes[1]);
  REQUIRE(outcomes[2]);
  const std::string text = outcomes[1]->message + outcomes[2]->message;
  CHECK(text.find("rank 0 sent what is no part of an all-reduce") != std::string::npos);
}

TEST_CASE("a channel that cannot do it is refused") {
  std::vector<float> floats(2);
  Ranks synchronous({.bound = 0});
  CHECK_THROWS_WITH_AS(reduce_floats(synchronous[0], floats),
                       doctest::Contains("has a bound of 0, but needs one of 1"),
                       std::invalid_argument);
  Ranks small(setup_of(2, kMinSlotBytes));
  CHECK_THROWS_WITH_AS(reduce_floats(small[0], floats), doctest::Contains("too small"),
                       std::invalid_argument);
  Ranks ranks(setup_of(2, 1024));
  auto* at = reinterpret_cast<std::byte*>(floats.data());
  CHECK_THROWS_WITH_AS(all_reduce(ranks[0], Element::kInt32, Reduction::kAverage, at, 2),
                       doctest::Contains("averages of int32"), std::invalid_argument);
}
