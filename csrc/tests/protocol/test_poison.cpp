// Poison, and peers that die: who learns of them, and who is named.

#include <doctest/doctest.h>

#include <thread>

#include "tests/support/checks.h"
#include "tests/support/heap_transport.h"
#include "tests/support/transport_under_test.h"

using namespace bls;
using namespace bls::testing;

TEST_CASE("poison reaches ranks that wait and names its origin and reason") {
  Ranks ranks({.world_size = 4});
  const auto failures = ranks.outcomes([](int rank, Channel& channel) {
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(20));  // the others sleep by then
      channel.poison("the lookup failed");
      return;
    }
    post_text(channel);
    channel.wait();
  });
  CHECK_FALSE(failures[2]);
  for (const int rank : {0, 1, 3}) {
    check_failure(failures[static_cast<size_t>(rank)], ErrorKind::kPoisoned,
                  "channel 'tested' on rank " + std::to_string(rank) +
                      ", sequence 0, lag 0: stopped because rank 2 failed: channel 'tested' on "
                      "rank 2, sequence 0, lag 0: the lookup failed");
  }
}

TEST_CASE("the first poison is the one that is told, cut to what fits" *
          doctest::skip(transport_under_test() == "heap")) {
  Ranks ranks({});
  ranks[0].poison(std::string(5000, 'a'));
  ranks[1].poison("second");
  const auto failure = failure_of([&] { post_text(ranks[1]); });
  check_failure(failure, ErrorKind::kPoisoned, "rank 0 failed: ");
  check_failure(failure, ErrorKind::kPoisoned, "aaaa");
  CHECK(failure->message.size() < 1200);
}

TEST_CASE("a rank that is poisoned tells the ranks that its origin did not reach" *
          doctest::skip(transport_under_test() == "heap")) {
  Ranks ranks({.world_size = 3});
  // Rank 2 died while it told the others: only rank 0 knows.
  const_cast<std::atomic<uint32_t>&>(ranks.transport(0).poisoned()).store(2 + 1);
  check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kPoisoned, "rank 2 failed");
  ranks[0].close();
  check_failure(failure_of([&] { post_text(ranks[1]); }), ErrorKind::kPoisoned, "rank 2 failed");
}

TEST_CASE("a peer that died is named, what it sent before counts") {
  const Setup setup{.world_size = 3, .bound = 1};
  auto mesh = std::make_shared<HeapMesh>(3, setup.slot_count(), setup.slot_bytes);
  Transports transports;
  for (int rank = 0; rank < 3; ++rank) {
    transports.push_back(std::make_unique<HeapTransport>(mesh, rank));
  }
  Ranks ranks(setup, std::move(transports));
  for (int rank = 0; rank < 3; ++rank) post_text(ranks[rank], "last words");
  mesh->rank(1).dead = true;
  for (const int rank : {0, 2}) {
    CHECK(text_of(ranks[rank].wait().part(1, 0)) == "last words");
    ranks[rank].release();
    post_text(ranks[rank]);
  }
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPeerDied,
                "sequence 1, lag 0: rank 1 died while this rank waited for it to send");
  check_failure(failure_of([&] { ranks[2].wait(); }), ErrorKind::kPoisoned, "rank 1 died");
}

TEST_CASE("a dead peer is noticed while another one is awaited") {
  const Setup setup{.world_size = 3, .deadline = milliseconds(2000)};
  auto mesh = std::make_shared<HeapMesh>(3, setup.slot_count(), setup.slot_bytes);
  Transports transports;
  for (int rank = 0; rank < 3; ++rank) {
    transports.push_back(std::make_unique<HeapTransport>(mesh, rank));
  }
  Ranks ranks(setup, std::move(transports));
  mesh->rank(1).dead = true;
  // Rank 0 waits for rank 2 before rank 1, and rank 2 does not send.
  post_text(ranks[0]);
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPeerDied, "rank 1 died");
}

TEST_CASE("a peer that closed because of a third one's failure is not blamed") {
  Ranks ranks({.world_size = 3});
  post_text(ranks[0]);
  ranks[2].poison("the lookup failed");
  ranks[2].close();
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPoisoned, "the lookup failed");
}

TEST_CASE("a channel is ready when a wait would raise") {
  Ranks ranks({.world_size = 3});
  check_failure(failure_of([&] { ranks[0].ready(); }), std::nullopt, "call post first");
  post_text(ranks[0]);
  CHECK_FALSE(ranks[0].ready());
  SUBCASE("because a peer closed") {
    ranks[2].close();
    CHECK(ranks[0].ready());
    check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPeerClosed, "rank 2 closed");
  }
  SUBCASE("because of poison") {
    ranks[1].poison("the disk is full");
    CHECK(ranks[0].ready());
    check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPoisoned, "the disk is full");
  }
}
