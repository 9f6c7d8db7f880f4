// Forwards that end early on a rank, which takes part in the calls that its peers still make.

#include <doctest/doctest.h>

#include <string>
#include <thread>
#include <vector>

#include "channel/protocol.h"
#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// Looks again until it is so: messages and ends may take a while.
template <class Condition>
bool soon(Condition condition) {
  const auto end = Clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

using Peers = std::vector<int>;

/// Calls of one module in some forwards, the same on all ranks, and who fails where.
struct Plan {
  struct Forward {
    uint32_t calls;
    std::vector<uint32_t> made;  // [rank], fewer where it fails
  };
  std::vector<Forward> forwards;

  explicit Plan(Random& random, int world_size) {
    for (int number = 0; number < 20; ++number) {
      Forward forward{static_cast<uint32_t>(draw(random, 0, 3)), {}};
      forward.made.assign(static_cast<size_t>(world_size), forward.calls);
      for (uint32_t& made : forward.made) {
        if (draw(random, 0, 3) == 0) made = static_cast<uint32_t>(draw(random, 0, forward.calls));
      }
      forwards.push_back(forward);
    }
  }
};

uint32_t label_of(size_t forward, uint32_t place) {
  return static_cast<uint32_t>(forward << 8) | place;
}

/// A rank's part in a call: `text` for all, and the texts of all.
std::vector<std::string> call(Channel& channel, uint32_t label, const std::string& text) {
  channel.label(label);
  post_text(channel, text);
  const Arrival& arrival = channel.wait();
  std::vector<std::string> texts;
  for (int rank = 0; rank < channel.config().world_size; ++rank) {
    const bool own = rank == channel.config().rank;
    texts.push_back(own ? text : text_of(arrival.part(rank, 0)));
  }
  channel.release();
  return texts;
}

void run_plan(int rank, Channel& channel, const Plan& plan) {
  for (size_t number = 0; number < plan.forwards.size(); ++number) {
    const Plan::Forward& forward = plan.forwards[number];
    const auto expected = [&](uint32_t place) {
      std::vector<std::string> texts;
      for (const uint32_t made : forward.made) {
        texts.push_back(place < made ? std::to_string(label_of(number, place)) : "");
      }
      return texts;
    };
    const uint32_t made = forward.made[static_cast<size_t>(rank)];
    for (uint32_t place = 0; place < made; ++place) {
      const uint32_t label = label_of(number, place);
      expect(call(channel, label, std::to_string(label)) == expected(place), "another's text");
    }
    channel.tell_end(number + 1);
    if (made == forward.calls) continue;
    uint32_t place = made;
    const auto follow = [&] {
      while (const auto label = channel.called(number + 1)) {
        if (*label >> 8 != number) break;
        expect(*label == label_of(number, place), "a call was missed");
        expect(call(channel, *label, "") == expected(place++), "another's text");
      }
      return channel.not_ended(number + 1).empty();
    };
    expect(soon(follow), "a peer does not end its forward");
  }
}

}  // namespace

TEST_CASE("a message for the next post is seen with what it belongs to") {
  Ranks ranks({.world_size = 3, .bound = 1});
  CHECK_FALSE(ranks[0].called(1));
  ranks[2].label(0x0102);
  post_text(ranks[2]);
  CHECK(soon([&] { return ranks[0].called(1) == 0x0102u; }));
  CHECK(ranks[0].posted() == 0);
  ranks[0].label(0x0102);
  post_text(ranks[0]);
  CHECK_FALSE(ranks[0].called(1));  // that was for the post before
}

TEST_CASE("a message for the next post is seen in the slot of an earlier one") {
  Ranks ranks({});
  for (uint32_t label = 0; label < 5; ++label) {
    ranks[1].label(label);
    post_text(ranks[1]);
    REQUIRE(soon([&] { return ranks[0].called(1) == label; }));
    ranks[0].label(label);
    post_text(ranks[0]);
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
}

TEST_CASE("ranks know which peers have ended a forward") {
  Ranks ranks({.world_size = 3});
  CHECK(ranks[0].not_ended(0).empty());
  CHECK(ranks[0].not_ended(1) == Peers{1, 2});
  ranks[1].tell_end(1);
  CHECK(soon([&] { return ranks[0].not_ended(1) == Peers{2}; }));
  ranks[1].tell_end(2);
  ranks[2].tell_end(1);
  CHECK(soon([&] { return ranks[0].not_ended(1).empty(); }));
  CHECK(soon([&] { return ranks[0].not_ended(2) == Peers{2}; }));
  CHECK(soon([&] { return ranks[2].not_ended(1) == Peers{0}; }));
}

TEST_CASE("a peer that has ended a forward may close, one that has not is named") {
  Ranks ranks({});
  ranks[1].tell_end(1);
  ranks[1].close();
  CHECK_FALSE(ranks[0].called(1));
  CHECK(soon([&] { return ranks[0].not_ended(1).empty(); }));
  check_failure(failure_of([&] { ranks[0].called(2); }), ErrorKind::kPeerClosed,
                "rank 1 closed the channel while this rank waited for it to end its forward");
}

TEST_CASE("a message of a peer that closed is still seen") {
  Ranks ranks({});
  ranks[1].label(3);
  post_text(ranks[1]);
  ranks[1].close();
  CHECK(soon([&] { return ranks[0].called(1) == 3u; }));
}

TEST_CASE("who looks for calls is told of poison, and of a closed channel") {
  Ranks ranks({});
  ranks[1].poison("the lookup failed");
  CHECK(soon([&] {
    const auto failure = failure_of([&] { ranks[0].called(1); });
    return failure && failure->kind == ErrorKind::kPoisoned;
  }));
  ranks[0].close();
  check_failure(failure_of([&] { ranks[0].called(1); }), ErrorKind::kClosed, "is closed");
  check_failure(failure_of([&] { ranks[0].not_ended(1); }), ErrorKind::kClosed, "is closed");
  CHECK_NOTHROW(ranks[0].tell_end(1));
}

TEST_CASE("a damaged header is refused before its label is believed") {
  Ranks ranks({});
  post_text(ranks[1]);
  std::byte* const slot = ranks.arrived(0, 1, 0);
  slot[offsetof(MessageHeader, version)] = std::byte{99};
  check_failure(failure_of([&] { ranks[0].called(1); }), ErrorKind::kProtocol,
                "damaged header: wire version 99");
}

TEST_CASE("ranks whose forwards end early take part in the calls of the others") {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Setup setup{.world_size = static_cast<int>(draw(random, 2, 4)),
                      .bound = static_cast<uint32_t>(draw(random, 0, 2))};
    const Plan plan(random, setup.world_size);
    Ranks ranks(setup);
    REQUIRE_NOTHROW(ranks.run([&](int rank, Channel& channel) { run_plan(rank, channel, plan); }));
  }
}
