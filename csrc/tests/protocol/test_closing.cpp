// Channels that are closed, or abandoned by a forked child.

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "channel/protocol.h"
#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

TEST_CASE("a peer that closed is named, what it sent before counts") {
  Ranks ranks({.bound = 1});
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], "last words");
  ranks[1].close();
  post_text(ranks[0]);
  CHECK(text_of(ranks[0].wait().part(1, 0)) == "last words");
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPeerClosed,
                "rank 1 closed the channel while this rank waited for it to send");
}

TEST_CASE("a rank cannot use a channel that it closed") {
  Ranks ranks({});
  ranks[0].close();
  ranks[0].close();
  CHECK(ranks[0].closed());
  check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kClosed,
                "channel 'tested' on rank 0 is closed");
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kClosed, "rank 0 is closed");
  check_failure(failure_of([&] { ranks[0].release(); }), ErrorKind::kClosed, "rank 0 is closed");
}

TEST_CASE("closing from another thread ends a wait") {
  Ranks ranks({});
  std::thread closing([&] {
    std::this_thread::sleep_for(milliseconds(20));
    ranks[0].close();
  });
  post_text(ranks[0]);
  const auto failure = failure_of([&] { ranks[0].wait(); });
  closing.join();
  check_failure(failure, ErrorKind::kClosed, "closed");
}

TEST_CASE("closing from another thread ends a post that waits for a slot") {
  Ranks ranks({.bound = 1, .slots = 2});
  for (int i = 0; i < 2; ++i) {
    post_text(ranks[0]);
    post_text(ranks[1]);
  }
  ranks[0].wait();
  ranks[0].release();
  std::thread closing([&] {
    std::this_thread::sleep_for(milliseconds(20));
    ranks[0].close();
  });
  const auto failure = failure_of([&] { post_text(ranks[0]); });
  closing.join();
  check_failure(failure, ErrorKind::kClosed, "closed");
}

TEST_CASE("closing keeps large messages until they are read") {
  Ranks ranks({.slot_bytes = kMinSlotBytes});
  const std::string large(100000, 'x');
  ranks.run([&](int rank, Channel& channel) {
    post_text(channel, large);
    if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    if (rank == 1) {
      expect(text_of(channel.wait().part(0, 0)) == large, "wrong text");
      channel.release();
    }
    channel.close();
  });
}

TEST_CASE("ranks that close without reading large messages do not wait for each other") {
  Ranks ranks({.slot_bytes = kMinSlotBytes, .deadline = std::chrono::hours(1)});
  ranks.run([](int, Channel& channel) {
    post_text(channel, std::string(100000, 'x'));
    channel.close();
  });
}

TEST_CASE("an abandoned channel refuses every call and touches nothing") {
  Ranks ranks({});
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ranks[0].abandon();
    int refused = 0;
    for (const auto& call : {std::function<void()>([&] { post_text(ranks[0]); }),
                             std::function<void()>([&] { ranks[0].wait(); })}) {
      const auto failure = failure_of(call);
      refused += failure && failure->kind == ErrorKind::kClosed &&
                 failure->message.find("a forked child") != std::string::npos;
    }
    ranks[0].poison("nobody may hear this");
    ranks[0].close();
    _exit(refused);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 2);
  CHECK(ranks.transport(1).poisoned() == 0);
  CHECK(ranks.transport(1).peer_state(0) == PeerState::kOpen);
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank]);
  CHECK(text_of(ranks[0].wait().part(1, 0)) == text_of(ranks[1].wait().part(0, 0)));
}
