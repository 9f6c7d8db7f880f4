// Messages larger than a slot over the fake: the bytes of their addresses, and reads that fail or
// wait.

#include <doctest/doctest.h>

#include <cstring>

#include "channel/protocol.h"
#include "tests/verbs/fake_ranks.h"

using namespace bls;
using namespace bls::testing;

TEST_SUITE_BEGIN("verbs");

TEST_CASE("memory of a large message that is not there is an error and not its bytes") {
  FakeRanks ranks({.slot_bytes = kMinSlotBytes});
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::string(10000, 'x'));
  std::byte* const slot = ranks.ranks->arrived(1, 0, 0);
  std::byte* const at = slot + header_bytes(1);
  MemoryAddress address;
  std::memcpy(&address, at, sizeof(address));
  SUBCASE("another address") { address.where[0] += 1 << 20; }
  SUBCASE("another key") { address.where[1] += 1000; }
  SUBCASE("more than there is") {
    address.bytes += 4096;
    std::memcpy(slot + header_bytes(0), &address.bytes, sizeof(address.bytes));
  }
  std::memcpy(at, &address, sizeof(address));
  check_failure(failure_of([&] { ranks[1].wait(); }), ErrorKind::kTransport,
                "rank 0 is lost, and this rank waited for it to be read: fake0 port 1: it refused "
                "access to its memory");
  // The other side hears of it by poison or by the event, whichever is first.
  const auto failure = failure_of([&] {
    ranks[0].wait();
    post_text(ranks[0]);
  });
  CHECK(failure);
}

TEST_CASE("a large message has the bytes that docs/wire-format.md shows") {
  FakeRanks ranks({.bound = 1, .slot_bytes = kMinSlotBytes});
  for (int i = 0; i < 4; ++i) {
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank]);
    for (int rank = 0; rank < 2 && i < 3; ++rank) {
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
  post_text(ranks[0], std::string(10000, 'x'));
  const std::byte* const slot = ranks.ranks->arrived(1, 0, 4);
  std::array<uint64_t, 8> words;
  std::memcpy(words.data(), slot, sizeof(words));
  CHECK(words[0] == 5);
  CHECK(words[1] == 0x0001'0000'0103'b15a);
  CHECK(words[2] == 3);
  CHECK(words[3] == 10000);
  CHECK(words[4] % 64 == 0);
  CHECK(*reinterpret_cast<const char*>(words[4]) == 'x');  // both ranks are in one process
  CHECK(words[5] <= UINT32_MAX);
  CHECK(words[6] == 0);
  CHECK(words[7] == 10000);
  // Closing would wait for it to be read.
  post_text(ranks[1]);
  for (int i = 0; i < 2; ++i) {
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
}

TEST_CASE("reading a large message ends at the deadline") {
  FakeRanks ranks({.slot_bytes = kMinSlotBytes, .deadline = milliseconds(100)});
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::string(10000, 'x'));
  for (int rank = 0; rank < 2; ++rank) ranks.ranks->arrived(rank, 1 - rank, 0);
  ranks.library->hold(ranks.pair(1, 0), true);
  check_failure(failure_of([&] { ranks[1].wait(); }), ErrorKind::kTimeout,
                "rank 0 sent a message that cannot be read: fake0 port 1: reading 10000 bytes");
}

TEST_CASE("an interrupt ends the waits for a device, and all ranks are told") {
  const Setup setup{.slot_bytes = kMinSlotBytes,
                    .deadline = std::chrono::minutes(10),
                    .interrupt = [] { throw Interruption("struck"); }};
  const auto check_struck = [](const std::optional<Failure>& failure) {
    REQUIRE(failure);
    CHECK_MESSAGE((!failure->kind && failure->message == "struck"), failure->message);
  };
  const auto name = "because rank 0 failed: channel 'tested' on rank 0, sequence 0, lag 0: struck";
  SUBCASE("in reading a large message") {
    FakeRanks ranks(setup);
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::string(10000, 'x'));
    for (int rank = 0; rank < 2; ++rank) ranks.ranks->arrived(rank, 1 - rank, 0);
    ranks.library->hold(ranks.pair(0, 1), true);
    check_struck(failure_of([&] { ranks[0].wait(); }));
    ranks.library->hold(ranks.pair(0, 1), false);
    check_poisoned(ranks, 1, name);
  }
  SUBCASE("in what still has to leave at a close") {
    FakeRanks ranks(setup);
    ranks.library->hold(ranks.pair(0, 1), true);
    post_text(ranks[0]);
    check_struck(failure_of([&] { ranks[0].close(); }));
    CHECK(ranks[0].closed());
    ranks.library->hold(ranks.pair(0, 1), false);
    check_poisoned(ranks, 1, name);
  }
  SUBCASE("in a post whose slot is still in use") {
    FakeRanks ranks(setup);
    leave_outbox_in_use(ranks);
    check_struck(failure_of([&] { post_text(ranks[0]); }));
    ranks.library->hold(ranks.pair(0, 1), false);
    check_poisoned(ranks, 1, "because rank 0 failed: ");
  }
}

TEST_SUITE_END();
