// Calls that are refused, and that nothing happens then.

#include <doctest/doctest.h>

#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

TEST_CASE("more than bound + 1 unreleased posts are refused") {
  Ranks ranks({.bound = 1});
  for (int rank = 0; rank < 2; ++rank) {
    post_text(ranks[rank]);
    post_text(ranks[rank]);
  }
  const auto refused = failure_of([&] { post_text(ranks[0]); });
  check_failure(refused, std::nullopt, "channel 'tested' on rank 0 has bound 1 and 2 posts");
  ranks[0].wait();
  CHECK(failure_of([&] { post_text(ranks[0]); }));  // waited for, but not released
  ranks[0].release();
  CHECK_FALSE(failure_of([&] { post_text(ranks[0]); }));
}

TEST_CASE("a wait without a post and a release without a wait are refused") {
  Ranks ranks({.bound = 1});
  check_failure(failure_of([&] { ranks[0].wait(); }), std::nullopt, "call post first");
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank]);
  check_failure(failure_of([&] { ranks[0].release(); }), std::nullopt, "wait for it first");
  ranks[0].wait();
  ranks[0].release();
  check_failure(failure_of([&] { ranks[0].release(); }), std::nullopt, "wait for it first");
}

TEST_CASE("a post needs one message per rank") {
  Ranks ranks({.world_size = 3});
  const Message messages[2];
  check_failure(failure_of([&] { ranks[0].post(messages); }), std::nullopt,
                "one message per rank: 3, not 2");
}

TEST_CASE("too few slots for the bound are refused") {
  check_failure(failure_of([] { Ranks({.bound = 2, .slots = 2}); }), std::nullopt,
                "bound 2 needs at least 3 slots, not 2");
}

TEST_CASE("a post that is refused sends nothing to anyone") {
  Ranks ranks({.world_size = 3});
  Outgoing too_many(3);
  too_many.add(1, bytes_of("never sent"));
  for (size_t i = 0; i <= kMaxParts; ++i) too_many.add(2, {});
  check_failure(failure_of([&] { ranks[0].post(too_many.messages()); }), std::nullopt,
                "17 parts, at most 16");
  CHECK(ranks[0].stats().messages == 0);
  ranks.run([](int, Channel& channel) {
    post_text(channel, "sent");
    const Arrival& arrival = channel.wait();
    for (int peer = 0; peer < 3; ++peer) {
      if (peer != channel.config().rank) {
        expect(text_of(arrival.part(peer, 0)) == "sent", "a message of the refused post arrived");
      }
    }
    channel.release();
  });
}
