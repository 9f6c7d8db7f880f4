// What ends when a deadline passes, and whom it blames.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <thread>
#include <utility>

#include "channel/protocol.h"
#include "tests/support/checks.h"
#include "tests/support/heap_transport.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// Of a rank that notes until when it sleeps. Something happens at its first sleep.
class Watched final : public HeapTransport {
 public:
  using HeapTransport::HeapTransport;

  void sleep(bool (*ready)(void*), void* context, Clock::time_point until) override {
    if (!first_sleep) {
      first_sleep = Clock::now();
      at_first_sleep();
    }
    latest_end = std::max(latest_end, until);
    HeapTransport::sleep(ready, context, until);
  }
  uint64_t credit(int destination) override {
    ++asked_for_credit[static_cast<size_t>(destination)];
    return HeapTransport::credit(destination);
  }

  std::function<void()> at_first_sleep;
  std::optional<Clock::time_point> first_sleep;
  Clock::time_point latest_end;
  std::array<int, 3> asked_for_credit{};
};

/// Three ranks, of which the first is watched.
std::pair<Watched*, Transports> watched_transports(const Setup& setup) {
  const auto mesh = std::make_shared<HeapMesh>(3, setup.slot_count(), setup.slot_bytes);
  auto watched = std::make_unique<Watched>(mesh, 0);
  Watched* const first = watched.get();
  Transports transports;
  transports.push_back(std::move(watched));
  for (int rank = 1; rank < 3; ++rank) {
    transports.push_back(std::make_unique<HeapTransport>(mesh, rank));
  }
  return {first, std::move(transports)};
}

}  // namespace

TEST_CASE("the deadline names the ranks that are missing") {
  Ranks ranks({.world_size = 4, .bound = 1, .deadline = milliseconds(100)});
  const auto failures = ranks.outcomes([](int rank, Channel& channel) {
    if (rank == 2 || rank == 3) return;
    post_text(channel);
    if (rank == 0) channel.wait();
  });
  const auto& failure = failures[0];
  check_failure(failure, ErrorKind::kTimeout,
                "channel 'tested' on rank 0, sequence 0, lag 0: rank 3 did not send within");
  check_failure(failure, ErrorKind::kTimeout, "Missing: rank 2, rank 3");
}

TEST_CASE("the deadline names a rank that does not free its slots") {
  Ranks ranks({.bound = 1, .slots = 2, .deadline = milliseconds(100)});
  const auto failures = ranks.outcomes([](int rank, Channel& channel) {
    post_text(channel);
    post_text(channel);
    if (rank == 1) return;
    channel.wait();
    channel.release();
    post_text(channel);
  });
  check_failure(failures[0], ErrorKind::kTimeout,
                "rank 1 did not read 2 earlier messages within 0.100000 s. A rank that is stuck, "
                "stopped or releases nothing causes this; raise the deadline if it is only slow");
}

TEST_CASE("all waits of one call have one deadline together") {
  const Setup setup{.world_size = 3, .slots = 1, .deadline = milliseconds(500)};
  auto [watched, transports] = watched_transports(setup);
  Ranks ranks(setup, std::move(transports));
  std::optional<Failure> failure;
  SUBCASE("of a wait for two peers") {
    post_text(ranks[0]);
    watched->at_first_sleep = [&] { post_text(ranks[2]); };
    failure = failure_of([&] { ranks[0].wait(); });
  }
  SUBCASE("of a post that needs slots of two peers") {
    for (int rank = 0; rank < 3; ++rank) post_text(ranks[rank]);
    ranks[0].wait();
    ranks[0].release();
    watched->at_first_sleep = [&] {
      ranks[1].wait();
      ranks[1].release();
    };
    failure = failure_of([&] { post_text(ranks[0]); });
  }
  check_failure(failure, ErrorKind::kTimeout, "rank ");
  REQUIRE(watched->first_sleep);
  CHECK(watched->latest_end <= *watched->first_sleep + setup.deadline);
}

TEST_CASE("closing gives all peers that do not read large messages one deadline together") {
  const Setup setup{.world_size = 3, .slot_bytes = kMinSlotBytes, .deadline = milliseconds(100)};
  auto [watched, transports] = watched_transports(setup);
  Ranks ranks(setup, std::move(transports));
  post_text(ranks[0], std::string(10000, 'x'));
  ranks[0].close();
  CHECK(watched->asked_for_credit[2] == 1);  // nothing of the deadline is left
}

TEST_CASE("a timeout on one rank ends the wait of the others") {
  Ranks ranks({.world_size = 3, .deadline = milliseconds(200)});
  const auto failures = ranks.outcomes([](int rank, Channel& channel) {
    if (rank == 2) return;
    if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    post_text(channel);
    channel.wait();
  });
  CHECK(failures[0]->kind == ErrorKind::kTimeout);
  check_failure(failures[1], ErrorKind::kPoisoned, "because rank 0 failed: ");
}
