// Threads as ranks in setups drawn at random, undisturbed and with ranks that fail or close at any
// moment. What they prove is for the sanitizers as much as for the assertions.

#include <doctest/doctest.h>

#include <algorithm>
#include <thread>

#include "tests/support/random_exchange.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr uint64_t kRounds = 16;

struct Drawn {
  Setup setup;
  Sizes sizes;
};

Drawn draw_setup(Random& random) {
  Drawn drawn;
  drawn.setup.world_size = static_cast<int>(draw(random, 2, 6));
  drawn.setup.bound = static_cast<uint32_t>(draw(random, 0, 5));
  // From the fewest that are safe to more than are ever used.
  drawn.setup.slots = drawn.setup.bound + static_cast<uint32_t>(draw(random, 1, 10));
  drawn.setup.slot_bytes = draw(random, kMinSlotBytes, 4000);
  drawn.sizes.largest_part = draw(random, 1, 900);
  drawn.sizes.most_parts = draw(random, 1, kMaxParts);
  drawn.sizes.oversized_every = draw(random, 0, 1) * draw(random, 2, 20);
  return drawn;
}

/// Runs `body(random, drawn, make)` for drawn setups, every other time over ordinary memory.
template <class Body>
void for_drawn_setups(Body body) {
  for (uint64_t round = 0; round < kRounds; ++round) {
    CAPTURE(round);
    Random random(round);
    body(random, draw_setup(random), round % 2 == 0 ? default_transports() : heap_transports);
  }
}

bool is_one_of(const Failure& failure, std::initializer_list<ErrorKind> kinds) {
  return failure.kind && std::find(kinds.begin(), kinds.end(), *failure.kind) != kinds.end();
}

void sleep_up_to(Random& random, size_t microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 0, microseconds)));
}

}  // namespace

TEST_CASE("messages arrive byte for byte in any setup") {
  for_drawn_setups([](Random&, const Drawn& drawn, const MakeTransports& make) {
    Ranks ranks(drawn.setup, make(drawn.setup));
    REQUIRE_NOTHROW(ranks.run(
        [&](int rank, Channel& channel) { random_exchange(rank, channel, drawn.sizes, 100); }));
  });
}

TEST_CASE(
    "ranks that fail at any moment end every wait, and one of them is named with its reason") {
  for_drawn_setups([](Random& random, const Drawn& drawn, const MakeTransports& make) {
    Ranks ranks(drawn.setup, make(drawn.setup));
    // The last two fail at about the same time.
    const int world_size = drawn.setup.world_size;
    const int first_failing = std::max(1, world_size - 2);
    const uint64_t before = draw(random, 0, 30);
    const auto reason = [](int rank) { return std::string(300, static_cast<char>('a' + rank)); };
    const auto failures = ranks.outcomes([&](int rank, Channel& channel) {
      random_exchange(rank, channel, drawn.sizes, rank < first_failing ? 1000 : before);
      channel.poison(reason(rank));
    });
    for (int rank = 0; rank < first_failing; ++rank) {
      const auto& failure = failures[static_cast<size_t>(rank)];
      REQUIRE(failure);
      CHECK_MESSAGE(failure->kind == ErrorKind::kPoisoned, failure->message);
      bool named = false;
      for (int origin = first_failing; origin < world_size; ++origin) {
        const std::string cause = "because rank " + std::to_string(origin) +
                                  " failed: channel 'tested' on rank " + std::to_string(origin) +
                                  ", sequence " + std::to_string(before) + ", lag ";
        named |= failure->message.find(cause) != std::string::npos &&
                 failure->message.ends_with(": " + reason(origin));
      }
      CHECK_MESSAGE(named, failure->message);
    }
    for (int rank = first_failing; rank < world_size; ++rank) {
      // The other one may have been faster.
      const auto& failure = failures[static_cast<size_t>(rank)];
      if (failure) CHECK_MESSAGE(failure->kind == ErrorKind::kPoisoned, failure->message);
    }
  });
}

TEST_CASE("ranks that close from another thread at any moment end every wait") {
  for_drawn_setups([](Random& random, const Drawn& drawn, const MakeTransports& make) {
    Ranks ranks(drawn.setup, make(drawn.setup));
    const size_t closing = draw(random, 1, static_cast<size_t>(drawn.setup.world_size));
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < closing; ++rank) {
      threads.emplace_back([&ranks, rank, seed = random()] {
        Random own(seed);
        sleep_up_to(own, 5000);
        ranks[static_cast<int>(rank)].close();
      });
    }
    const auto failures = ranks.outcomes([&](int rank, Channel& channel) {
      try {
        random_exchange(rank, channel, drawn.sizes, 100'000);
      } catch (...) {
        // As users do; until then a rank that closes waits for its large messages to be read.
        channel.close();
        throw;
      }
    });
    for (std::thread& thread : threads) thread.join();
    for (size_t rank = 0; rank < failures.size(); ++rank) {
      CAPTURE(rank);
      const auto& failure = failures[rank];
      REQUIRE(failure);
      // A rank that closes may hear of another one first.
      CHECK_MESSAGE((is_one_of(*failure, {ErrorKind::kPeerClosed, ErrorKind::kPoisoned}) ||
                     (rank < closing && is_one_of(*failure, {ErrorKind::kClosed}))),
                    failure->message);
    }
  });
}
