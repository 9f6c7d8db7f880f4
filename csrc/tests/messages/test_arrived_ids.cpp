// What is accepted and refused of the ids that other ranks send.

#include <doctest/doctest.h>

#include <cstring>
#include <limits>

#include "messages/ids/arrived_ids.h"
#include "messages/ids/ids_message.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// Lengths and values of int64 as `source` would send them, except for what a test changes.
struct Forged {
  int64_t stride = 2;
  uint32_t length_bytes = 8;
  uint32_t value_bytes = 8;
  uint32_t weight_bytes = 0;
  uint32_t flags = 0;
  std::vector<int64_t> lengths{1, 2};
  std::vector<int64_t> values{7, 8, 9};
  size_t parts = 3;
};

Bytes raw(const std::vector<int64_t>& numbers) {
  const auto* data = reinterpret_cast<const std::byte*>(numbers.data());
  return {data, data + numbers.size() * sizeof(int64_t)};
}

/// What rank 0 says to a message of rank 1 for its features, one or none.
std::optional<Failure> failure_with(const Forged& forged, size_t features = 1) {
  Ranks ranks({.slot_bytes = 1024});
  const int64_t lengths[] = {0};
  const size_t features_per_rank[] = {features, 0};
  JaggedIds ids;
  ids.lengths = reinterpret_cast<const std::byte*>(lengths);
  ids.features = features;
  ids.stride = 1;
  post_ids(ranks[0], ids, features_per_rank);
  Bytes preamble(56);
  std::memcpy(preamble.data(), &forged.stride, 8);
  std::memcpy(preamble.data() + 8, &forged.length_bytes, 4);
  std::memcpy(preamble.data() + 12, &forged.value_bytes, 4);
  std::memcpy(preamble.data() + 16, &forged.weight_bytes, 4);
  std::memcpy(preamble.data() + 20, &forged.flags, 4);
  Outgoing outgoing(2);
  const Bytes parts[] = {preamble, raw(forged.lengths), raw(forged.values), raw({1, 2, 3, 4})};
  for (size_t i = 0; i < forged.parts; ++i) outgoing.add(0, parts[i]);
  ranks[1].post(outgoing.messages());
  const Arrival& arrival = ranks[0].wait();
  const int order[] = {0, 1};
  return failure_of([&] { ArrivedIds(arrival, features, order); });
}

void check_refused(const Forged& forged, const std::string& text, size_t features = 1) {
  const auto failure = failure_with(forged, features);
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK_MESSAGE(failure->message.find("ids from rank 1 do not fit: " + text) == 0,
                failure->message);
}

}  // namespace

TEST_CASE("an honest message is accepted") { CHECK_FALSE(failure_with({})); }

TEST_CASE("messages that contradict themselves or the local plan are refused") {
  SUBCASE("too few parts") { check_refused({.parts = 2}, "2 parts"); }
  SUBCASE("other item sizes") {
    check_refused({.value_bytes = 4}, "items of 8 (lengths), 4 (ids) and 0 (weights) bytes");
  }
  SUBCASE("weights that this rank does not send") {
    check_refused({.weight_bytes = 4, .parts = 4}, "they have weights, but those from rank ");
  }
  SUBCASE("lengths of another batch size") {
    check_refused({.stride = 3}, "16 bytes of lengths for 1 features of batch size 3");
  }
  SUBCASE("negative batch size") { check_refused({.stride = -1}, "16 bytes of lengths"); }
  SUBCASE("a batch size whose bytes overflow to the right number") {
    check_refused({.stride = (int64_t{1} << 61) + 2}, "16 bytes of lengths");
  }
  SUBCASE("batch size beyond all memory, for no feature") {
    const int64_t most = std::numeric_limits<int64_t>::max();
    check_refused({.stride = most, .lengths = {}, .values = {}},
                  "0 bytes of lengths for 0 features of batch size " + std::to_string(most), 0);
  }
  SUBCASE("a negative length") { check_refused({.lengths = {-1, 4}}, "a length is negative or"); }
  SUBCASE("lengths whose sum overflows to the right number") {
    constexpr int64_t large = int64_t{1} << 62;
    check_refused({.stride = 5, .lengths = {large, large, large, large, 3}},
                  "a length is negative or");
  }
  SUBCASE("unknown flags") { check_refused({.flags = 4}, "unknown flags 4"); }
  SUBCASE("a refused batch with samples") {
    check_refused({.flags = 2, .parts = 4}, "a refused batch of 2 samples in 4 parts");
  }
  SUBCASE("a refused batch without a reason") {
    check_refused({.stride = 0, .flags = 2, .lengths = {}, .values = {}},
                  "a refused batch of 0 samples in 3 parts");
  }
  SUBCASE("ids without samples") {
    check_refused({.stride = 0, .lengths = {}}, "0 bytes of lengths and 24 of ids without samples");
  }
  SUBCASE("fewer values than the lengths say") {
    check_refused({.values = {7, 8}}, "16 bytes for 3 ids");
  }
}
