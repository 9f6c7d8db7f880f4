#include <doctest/doctest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "channel/protocol.h"
#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

namespace {

// Far beyond what a test takes: whatever ends a wait, it is not this.
constexpr std::chrono::minutes kNever{60};

/// What the caller of a channel wants to get back.
class Struck final : public Interruption {
 public:
  Struck() : Interruption("struck") {}
};

void strike() { throw Struck(); }

template <class Call>
bool is_struck(Call call) {
  try {
    call();
  } catch (const Struck&) {
    return true;
  }
  return false;
}

/// Peers learn of the interrupt, and of what this rank was at.
void check_told(Ranks& ranks, uint64_t sequence) {
  for (int rank = 1; rank < ranks.world_size(); ++rank) {
    Channel& channel = ranks[rank];
    const auto failure = failure_of([&] {
      for (;;) {
        if (channel.posted() == channel.completed()) post_text(channel);
        channel.wait();
        channel.release();
      }
    });
    REQUIRE(failure);
    CHECK_MESSAGE(failure->kind == ErrorKind::kPoisoned, failure->message);
    const std::string cause = "because rank 0 failed: channel 'tested' on rank 0, sequence " +
                              std::to_string(sequence) + ", lag 0: struck";
    CHECK_MESSAGE(failure->message.find(cause) != std::string::npos, failure->message);
  }
}

}  // namespace

TEST_SUITE_BEGIN("interrupt");

TEST_CASE("an interrupt ends a wait and fails all ranks") {
  Ranks ranks({.world_size = 3, .deadline = kNever, .interrupt = strike});
  post_text(ranks[0]);
  CHECK(is_struck([&] { ranks[0].wait(); }));
  CHECK(ranks[0].completed() == 0);
  check_told(ranks, 0);
}

TEST_CASE("an interrupt ends a post that waits for a slot and fails all ranks") {
  Ranks ranks({.bound = 1, .slots = 2, .deadline = kNever, .interrupt = strike});
  for (int i = 0; i < 2; ++i) {
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank]);
  }
  for (uint64_t i = 0; i < 2; ++i) ranks.arrived(0, 1, i);
  for (int i = 0; i < 2; ++i) {
    ranks[0].wait();
    ranks[0].release();
  }
  CHECK(is_struck([&] { post_text(ranks[0]); }));
  CHECK(ranks[0].posted() == 2);
  check_told(ranks, 2);
}

TEST_CASE("an interrupt ends a close that keeps a large message, and fails all ranks") {
  Ranks ranks({.slot_bytes = kMinSlotBytes, .deadline = kNever, .interrupt = strike});
  post_text(ranks[0], std::string(10000, 'x'));
  CHECK(is_struck([&] { ranks[0].close(); }));
  CHECK(ranks[0].closed());
  CHECK_FALSE(is_struck([&] { ranks[0].close(); }));
  check_told(ranks, 0);
}

TEST_CASE("an interrupt in a destructor ends nothing but the waiting") {
  auto ranks = std::make_unique<Ranks>(
      Setup{.slot_bytes = kMinSlotBytes, .deadline = kNever, .interrupt = strike});
  post_text((*ranks)[0], std::string(10000, 'x'));
  ranks.reset();
}

TEST_CASE("an interrupt that throws nothing disturbs nothing") {
  std::atomic<int> asked{0};
  Ranks ranks({.deadline = kNever, .interrupt = [&] { ++asked; }});
  ranks.run([&](int rank, Channel& channel) {
    for (int i = 0; i < 3; ++i) {
      if (rank == 1) {
        while (asked <= i) std::this_thread::yield();
      }
      post_text(channel, std::to_string(i));
      expect(text_of(channel.wait().part(1 - rank, 0)) == std::to_string(i), "wrong message");
      channel.release();
    }
  });
}

TEST_CASE("an interrupt may close the channel whose wait asks it") {
  Channel* waiting = nullptr;
  Ranks ranks({.deadline = kNever, .interrupt = [&] { waiting->close(); }});
  waiting = &ranks[0];
  post_text(ranks[0]);
  const auto failure = failure_of([&] { ranks[0].wait(); });
  REQUIRE(failure);
  CHECK_MESSAGE(failure->kind == ErrorKind::kClosed, failure->message);
}

TEST_CASE("a call that finds everything there asks for no interrupt") {
  Ranks ranks({.bound = 1, .interrupt = strike});
  for (int i = 0; i < 10; ++i) {
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank]);
    for (int rank = 0; rank < 2; ++rank) ranks.arrived(rank, 1 - rank, static_cast<uint64_t>(i));
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
  ranks[0].close();
}

TEST_CASE("signals that interrupt system calls neither end a wait nor move its deadline") {
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) {};  // without SA_RESTART
  sigaction(SIGUSR2, &action, &before);
  const milliseconds deadline{400};
  Ranks ranks({.deadline = deadline});
  post_text(ranks[0]);
  const pthread_t waiting = pthread_self();
  std::atomic<bool> done{false};
  std::thread signals([&] {
    while (!done) {
      pthread_kill(waiting, SIGUSR2);
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  const auto start = Clock::now();
  const auto failure = failure_of([&] { ranks[0].wait(); });
  CHECK(Clock::now() - start >= deadline);
  done = true;
  signals.join();
  sigaction(SIGUSR2, &before, nullptr);
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kTimeout);
}

TEST_SUITE_END();
