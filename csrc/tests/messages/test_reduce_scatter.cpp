#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "messages/all_to_all.h"
#include "messages/reduce_scatter.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// What `source` adds to float `index` of the sum of `destination`: of many magnitudes, so that
/// another order of the additions gives another sum.
float term(int source, int destination, size_t index) {
  const int seed = source * 7 + destination * 13 + static_cast<int>(index % 1009) * 31;
  return std::ldexp(static_cast<float>(seed % 97) + 1, seed % 23 - 11);
}

/// The sum as a ring makes it that begins behind rank `chunk` and ends there.
float ring_sum(int world_size, int chunk, int destination, size_t index) {
  float sum = 0;
  for (int step = 1; step <= world_size; ++step) {
    sum += term((chunk + world_size - step) % world_size, destination, index);
  }
  return sum;
}

/// Sums of `count` floats for each of `world_size` ranks; `chunk` is how many of all of them begin
/// at one rank.
void check_sums(int world_size, size_t count, size_t chunk) {
  Ranks ranks({.world_size = world_size, .slot_bytes = 1024});
  REQUIRE_NOTHROW(ranks.run([&](int rank, Channel& channel) {
    std::vector<float> input;
    for (int to = 0; to < world_size; ++to) {
      for (size_t i = 0; i < count; ++i) input.push_back(term(rank, to, i));
    }
    std::vector<Buffer> buffers;
    for (int to = 0; to < world_size; ++to) {
      float* part = input.data() + static_cast<size_t>(to) * count;
      buffers.push_back({reinterpret_cast<std::byte*>(part), count * sizeof(float)});
    }
    post_buffers(channel, buffers);
    std::vector<float> output(count, -1);
    collect_sum(channel.wait(), rank, output);
    channel.release();
    for (size_t i = 0; i < count; ++i) {
      const size_t place = static_cast<size_t>(rank) * count + i;
      expect(output[i] == ring_sum(world_size, static_cast<int>(place / chunk), rank, i), "sum");
    }
  }));
}

}  // namespace

TEST_CASE("sums have the order of a ring") {
  check_sums(1, 10, 10);
  check_sums(2, 8, 8);
  check_sums(4, 300, 300);          // 8 segments of 150 floats, two a rank
  check_sums(3, 5, 6);              // 6 segments of 2.5 floats, rounded up to 3
  check_sums(2, 3 << 18, 3 << 18);  // 6 segments of a MiB, three a rank
}

TEST_CASE("an empty sum is no sum") { check_sums(2, 0, 1); }

TEST_CASE("a message of another size than the sum is refused and nothing is written") {
  Ranks ranks({});
  std::vector<float> input(4, 1), output(2, -1);
  auto* at = reinterpret_cast<std::byte*>(input.data());
  post_buffers(ranks[0], std::vector<Buffer>{{at, 8}, {at, 8}});
  post_buffers(ranks[1], std::vector<Buffer>{{at, 4}, {at, 8}});
  const auto failure = failure_of([&] { collect_sum(ranks[0].wait(), 0, output); });
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK(failure->message.find("rank 1 sent 4 bytes") == 0);
  CHECK(output == std::vector<float>(2, -1));
}
