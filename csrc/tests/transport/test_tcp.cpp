// What is special about channels over TCP. The tests of the protocol run over them as well.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "errors.h"
#include "tests/support/checks.h"
#include "tests/support/ranks.h"
#include "tests/support/tcp_mesh.h"
#include "transport/tcp/background.h"
#include "transport/tcp/tcp_transport.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// Bytes that the kernel keeps of a connection: little.
constexpr int kSmallBuffer = 4096;

/// A rank, and the other end of its connection to rank 1, which no transport has.
struct Half {
  explicit Half(const Setup& setup = {}, int buffer_bytes = 0) {
    auto [own, other] = tcp_pair(buffer_bytes);
    const timeval patience{30, 0};
    setsockopt(other.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    setsockopt(other.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    peer = std::move(other);
    std::vector<Descriptor> sockets(2);
    sockets[1] = std::move(own);
    const RingShape shape{0, 2, setup.slot_count(), setup.slot_bytes};
    transport = std::make_unique<TcpTransport>(std::move(sockets), shape, setup.deadline);
  }
  void say(const void* data, size_t bytes) const {
    REQUIRE(send(peer.get(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes));
  }
  void say(const FrameHead& head) const { say(&head, sizeof(head)); }
  void hear(size_t bytes) const {
    std::vector<char> heard(bytes);
    REQUIRE(recv(peer.get(), heard.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
  }
  /// The state once it is no longer open.
  PeerState state() const {
    const auto end = Clock::now() + std::chrono::seconds(30);
    while (transport->peer_state(1) == PeerState::kOpen && Clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return transport->peer_state(1);
  }

  Descriptor peer;
  std::unique_ptr<TcpTransport> transport;
};

}  // namespace

TEST_CASE("two ranks send each other much more than the connection holds") {
  const Setup setup{.bound = 1, .slot_bytes = kMinSlotBytes};
  Ranks ranks(setup, tcp_transports(setup, kSmallBuffer));
  const std::string large(8 << 20, 'x');
  ranks.run([&](int rank, Channel& channel) {
    for (int round = 0; round < 3; ++round) {
      post_text(channel, large + std::to_string(round));
      expect(text_of(channel.wait().part(1 - rank, 0)) == large + std::to_string(round), "wrong");
      channel.release();
    }
    channel.close();
  });
}

TEST_CASE("a post does not wait for the connection") {
  const Setup setup{.bound = 1, .slot_bytes = kMinSlotBytes};
  Ranks ranks(setup, tcp_transports(setup, kSmallBuffer));
  const std::string large(8 << 20, 'x');
  // Of one thread: whoever waited for the other would wait for ever.
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], large);
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], "behind it");
  ranks.run([&](int rank, Channel& channel) {
    expect(text_of(channel.wait().part(1 - rank, 0)) == large, "wrong");
    channel.release();
    expect(text_of(channel.wait().part(1 - rank, 0)) == "behind it", "wrong");
    channel.close();
  });
}

TEST_CASE("a rank that computes takes large messages all the same") {
  Half half({.slot_bytes = kMinSlotBytes}, kSmallBuffer);
  const std::vector<char> large(8 << 20, 'x');
  const auto bytes = static_cast<uint32_t>(large.size());
  const auto say_large = [&](uint64_t number) {
    half.say({FrameKind::kMessage, 0, number, 0});
    half.say({FrameKind::kLarge, bytes, number, bytes});
    half.say(large.data(), large.size());
  };
  std::thread first(say_large, 0);
  half.transport->pull(1, 0, MemoryAddress{{}, bytes}, bytes);
  first.join();
  for (const bool after_a_post : {true, false}) {
    if (after_a_post) {
      half.transport->deliver(1, half.transport->outbox(1, 0), 8, 0);
    } else {
      half.transport->return_credit(1, 1);
    }
    say_large(after_a_post ? 1 : 2);  // without a call of the transport
  }
}

TEST_CASE("what a rank has not sent leaves without its calls") {
  Half half({.slot_bytes = kMinSlotBytes}, kSmallBuffer);
  const size_t bytes = 8 << 20;
  MemoryAddress address;
  std::memset(half.transport->expose(1, 0, bytes, address), 'x', bytes);
  half.transport->deliver(1, half.transport->outbox(1, 0), 8, 0);
  half.hear(bytes / 2);
  half.transport->progress();  // a look for messages, and then something else again
  half.hear(bytes / 2);
}

TEST_CASE("poison passes a large message by") {
  const Setup setup{.slot_bytes = kMinSlotBytes};
  Ranks ranks(setup, tcp_transports(setup, kSmallBuffer));
  post_text(ranks[0], std::string(8 << 20, 'x'));
  post_text(ranks[1], "small");
  std::thread poisoning([&] { ranks[0].poison("for a test"); });
  const auto failure = failure_of([&] { ranks[1].wait(); });
  poisoning.join();
  check_failure(failure, ErrorKind::kPoisoned, "for a test");
}

TEST_CASE("a peer whose connection ends without a note is dead") {
  Half half;
  half.peer.close();
  CHECK(half.state() == PeerState::kDead);
  CHECK(half.transport->peer_fault(1).empty());
}

TEST_CASE("a peer that says how many it has sent has closed once these are there") {
  Half half;
  half.say({FrameKind::kClosed, 0, 1, 0});
  CHECK(half.transport->peer_state(1) == PeerState::kOpen);
  while (half.transport->still_reads(1)) std::this_thread::yield();
  half.say({FrameKind::kMessage, 8, 0, 0});
  half.say("12345678", 8);
  half.peer.close();
  CHECK(half.state() == PeerState::kClosed);
  CHECK(std::memcmp(half.transport->inbox(1, 0) + 8, "12345678", 8) == 0);
}

TEST_CASE("a rank that closed in the middle of a post has closed for those that it did not reach") {
  const auto ranks = tcp_transports({.world_size = 3});
  ranks[0]->deliver(1, ranks[0]->outbox(1, 0), 8, 0);
  ranks[0]->announce_close();
  const auto end = Clock::now() + std::chrono::seconds(30);
  for (const auto& peer : {ranks[1].get(), ranks[2].get()}) {
    while (peer->peer_state(0) == PeerState::kOpen && Clock::now() < end) std::this_thread::yield();
    CHECK(peer->peer_state(0) == PeerState::kClosed);
  }
}

TEST_CASE("frames that can't be right cost the connection, and say so") {
  const Setup setup{.slot_bytes = 256};
  const auto bytes = static_cast<uint32_t>(slot_stride(256));
  for (const FrameHead& head : std::vector<FrameHead>{
           {static_cast<FrameKind>(0), 0, 0, 0},
           {static_cast<FrameKind>(99), 0, 0, 0},
           {FrameKind::kMessage, 8, 1, 0},          // not the next
           {FrameKind::kMessage, bytes - 7, 0, 0},  // larger than a slot
           {FrameKind::kLarge, 8, 0, 8},            // of no message
           {FrameKind::kCredit, 1, 0, 0},           // a count has nothing behind it
           {FrameKind::kPoison, 8, 2, 0},           // of a rank that is none
           {FrameKind::kPoison, 1025, 0, 0},
       }) {
    Half half(setup);
    half.say(head);
    CHECK(half.state() == PeerState::kFailed);
    CHECK(half.transport->peer_fault(1).find("can't be right") != std::string::npos);
  }
}

TEST_CASE("large messages that can't be right") {
  const uint64_t whole = 1000;
  for (const FrameHead& head : std::vector<FrameHead>{
           {FrameKind::kLarge, 8, 0, 0},
           {FrameKind::kLarge, 0, 0, whole},     // no end of empty pieces
           {FrameKind::kLarge, 1001, 0, whole},  // more than it says
           {FrameKind::kLarge, 8, 0, kMaxRingBytes + 1},
           {FrameKind::kLarge, 8, 1, whole},  // of a message that is not there
       }) {
    Half half;
    half.say({FrameKind::kMessage, 0, 0, 0});
    half.say(head);
    CHECK(half.state() == PeerState::kFailed);
  }
}

TEST_CASE("a large message of another size than its slot says is refused") {
  Half half;
  half.say({FrameKind::kMessage, 0, 0, 0});
  half.say({FrameKind::kLarge, 8, 0, 8});
  half.say("12345678", 8);
  const auto failure = failure_of([&] { half.transport->pull(1, 0, MemoryAddress{{}, 16}, 16); });
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK(failure->message.find("8 came") != std::string::npos);
}

TEST_CASE("a large message that does not come ends at the deadline") {
  Half half({.deadline = milliseconds(50)});
  half.say({FrameKind::kMessage, 0, 0, 0});
  const auto failure = failure_of([&] { half.transport->pull(1, 0, MemoryAddress{{}, 16}, 16); });
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kTimeout);
}

TEST_CASE("slots that a frame can't hold are refused") {
  const auto failure = failure_of([] {
    TcpTransport(std::vector<Descriptor>(2), RingShape{0, 2, 2, size_t{1} << 33}, milliseconds(1));
  });
  REQUIRE(failure);
  CHECK(failure->message.find("4 GiB") != std::string::npos);
}

TEST_CASE("a connection that can't be watched in the background is told to its user") {
  struct Owner final : Background::Owner {
    bool look() override { return false; }
    void go_on(int) override {}
  } owner;
  Background& background = Background::of_process();
  const uint64_t number = background.add(owner);
  const Descriptor file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));  // epoll takes no files
  CHECK_THROWS_WITH_AS(background.await(number, 0, file.get(), EPOLLOUT),
                       "a connection can't be watched in the background: Operation not permitted",
                       ChannelError);
  background.remove(number);
}
