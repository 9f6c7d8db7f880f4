#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "channel/protocol.h"
#include "tests/support/heap_transport.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"
#include "tests/support/transport_under_test.h"
#include "transport/shm/shm_segment.h"

using namespace bls;
using namespace bls::testing;

namespace {

using std::chrono::milliseconds;

void post_text(Channel& channel, const std::string& text = "") {
  Outgoing outgoing(channel.config().world_size);
  for (int rank = 0; rank < channel.config().world_size; ++rank) {
    if (rank != channel.config().rank) outgoing.add(rank, bytes_of(text));
  }
  channel.post(outgoing.messages());
}

void check_failure(const std::optional<Failure>& failure, std::optional<ErrorKind> kind,
                   const std::string& text) {
  REQUIRE(failure);
  CHECK_MESSAGE(failure->kind == kind, failure->message);
  CHECK_MESSAGE(failure->message.find(text) != std::string::npos, failure->message);
}

/// Of a rank whose peer has lost its memory and is found dead a little later.
class PeerDying final : public HeapTransport {
 public:
  using HeapTransport::HeapTransport;
  const std::byte* pull(int, uint32_t, const MemoryAddress&, size_t) override {
    throw ChannelError(ErrorKind::kRendezvous, "no memory");
  }
  PeerState peer_state(int) override { return ++asked_ < 5 ? PeerState::kOpen : PeerState::kDead; }

 private:
  int asked_ = 0;
};

/// Of a rank that fails to read large messages, though its peers are well.
class Unreadable final : public HeapTransport {
 public:
  Unreadable(std::shared_ptr<HeapMesh> mesh, int rank, std::exception_ptr error)
      : HeapTransport(std::move(mesh), rank), error_(std::move(error)) {}
  const std::byte* pull(int, uint32_t, const MemoryAddress&, size_t) override {
    std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

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

TEST_CASE("a message for which there is no memory fails the channel on all ranks" *
          doctest::skip(transport_under_test() != "shm")) {
  Ranks ranks({.world_size = 3});
  const Bytes row(1 << 20);
  const Block block{row.data(), row.size(), size_t{1} << 20, 0};
  const Part part(&block, 1);
  const Message messages[] = {{}, {}, {&part, 1}};
  const auto failure = failure_of([&] { ranks[0].post(messages); });
  check_failure(failure, ErrorKind::kRendezvous, "no memory for a message of rank 0");
  check_failure(failure, ErrorKind::kRendezvous, "1048576 MiB needed");
  check_failure(failure_of([&] { post_text(ranks[1]); }), ErrorKind::kPoisoned, "rank 0 failed: ");
}

TEST_CASE("a damaged message poisons the channel on all ranks") {
  struct Damage {
    size_t offset;
    std::string bytes;
    std::string text;
  };
  const size_t lengths = sizeof(MessageHeader);
  const Damage damages[] = {
      {offsetof(MessageHeader, arrival), std::string("\x09\0\0\0\0\0\0\0", 8),
       "wrote sequence 8 into the slot of 0"},
      {offsetof(MessageHeader, magic), "??", "magic"},
      {offsetof(MessageHeader, version), "\x63", "wire version 99"},
      {offsetof(MessageHeader, flags), "\x80", "unknown flags"},
      {offsetof(MessageHeader, source), "\x02", "comes from rank 2"},
      {offsetof(MessageHeader, parts), "\x63", "99 parts"},
      {offsetof(MessageHeader, credit), "\x10", "it read 16 of 1 messages"},
      {lengths, "\xff\xff\xff", "bytes in a slot of"},
      {lengths, "\xff\xff\xff\xff\xff\xff\xff\xff", "part 0 has"},
  };
  for (const Damage& damage : damages) {
    CAPTURE(damage.text);
    Ranks ranks({.world_size = 3});
    for (int rank = 0; rank < 3; ++rank) post_text(ranks[rank], "text");
    std::memcpy(ranks.arrived(1, 0, 0) + damage.offset, damage.bytes.data(), damage.bytes.size());
    check_failure(failure_of([&] { ranks[1].wait(); }), ErrorKind::kProtocol, damage.text);
    for (const int rank : {0, 2}) {
      check_failure(failure_of([&] { post_text(ranks[rank]); }), ErrorKind::kPoisoned,
                    "because rank 1 failed: ");
    }
  }
}

TEST_CASE("the address of a pulled message is checked" *
          doctest::skip(transport_under_test() != "shm")) {
  const std::string large(10000, 'x');
  Ranks ranks({.slot_bytes = kMinSlotBytes});
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], large);
  std::byte* const at = ranks.transport(1).inbox(0, 0) + header_bytes(1);
  SegmentAddress address;
  std::memcpy(&address, at, sizeof(address));
  ErrorKind kind = ErrorKind::kProtocol;
  std::string text;
  SUBCASE("foreign process") {
    address.pid = 1;
    text = "memory of a foreign process";
  }
  SUBCASE("other file") {
    ++address.inode;
    text = "not there any more";
  }
  SUBCASE("other size") {
    address.bytes += 4096;
    text = "not there any more";
  }
  SUBCASE("too short") {
    address.bytes = 9999;
    text = "10000 bytes in a pulled message's memory of 9999";
  }
  SUBCASE("descriptor that is not open") {
    address.fd = 1 << 20;
    kind = ErrorKind::kRendezvous;
    text = "cannot open shared memory";
  }
  std::memcpy(at, &address, sizeof(address));
  check_failure(failure_of([&] { ranks[1].wait(); }), kind, text);
  check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kPoisoned, text);
}

TEST_CASE("a peer that dies before a large message is read is named, though it dies slowly") {
  const Setup setup{.slot_bytes = kMinSlotBytes};
  const auto mesh = std::make_shared<HeapMesh>(2, setup.slot_count(), setup.slot_bytes);
  Transports transports;
  transports.push_back(std::make_unique<HeapTransport>(mesh, 0));
  transports.push_back(std::make_unique<PeerDying>(mesh, 1));
  Ranks ranks(setup, std::move(transports));
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::string(10000, 'x'));
  check_failure(failure_of([&] { ranks[1].wait(); }), ErrorKind::kPeerDied,
                "rank 0 died while this rank waited for it to be read");
}

TEST_CASE(
    "a large message that cannot be read fails the channel on all ranks, whatever the cause") {
  ErrorKind kind = ErrorKind::kTransport;
  std::exception_ptr error;
  std::string text;
  SUBCASE("the network") {
    error = std::make_exception_ptr(ChannelError(kind, "connection reset"));
    text = "connection reset. Look at that rank's own output, then at the network";
  }
  SUBCASE("the deadline") {
    kind = ErrorKind::kTimeout;
    error = std::make_exception_ptr(ChannelError(kind, "it did not come"));
    text = "it did not come. A rank that is stuck or stopped causes this; raise the deadline";
  }
  SUBCASE("memory") {
    kind = ErrorKind::kRendezvous;
    error = std::make_exception_ptr(ChannelError(kind, "no memory"));
    text = "no memory";
  }
  SUBCASE("nothing that is known") {
    error = std::make_exception_ptr(std::runtime_error("out of luck"));
    text = "out of luck";
  }
  const Setup setup{.slot_bytes = kMinSlotBytes};
  const auto mesh = std::make_shared<HeapMesh>(2, setup.slot_count(), setup.slot_bytes);
  Transports transports;
  transports.push_back(std::make_unique<HeapTransport>(mesh, 0));
  transports.push_back(std::make_unique<Unreadable>(mesh, 1, error));
  Ranks ranks(setup, std::move(transports));
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::string(10000, 'x'));
  const auto failure = failure_of([&] { ranks[1].wait(); });
  check_failure(failure, kind,
                "channel 'tested' on rank 1, sequence 0, lag 0: rank 0 sent a message that cannot "
                "be read: " +
                    text);
  check_failure(failure, kind, "With slot_bytes=10064 it would stand in its slot");
  check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kPoisoned, text);
}

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
          doctest::skip(transport_under_test() == "heap" ||
                        transport_under_test() == "two_sided")) {
  Ranks ranks({.world_size = 3});
  // Rank 2 died while it told the others: only rank 0 knows.
  const_cast<std::atomic<uint32_t>&>(ranks.transport(0).poisoned()).store(2 + 1);
  check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kPoisoned, "rank 2 failed");
  ranks[0].close();
  check_failure(failure_of([&] { post_text(ranks[1]); }), ErrorKind::kPoisoned, "rank 2 failed");
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

TEST_CASE("a peer that closed is named, what it sent before counts") {
  Ranks ranks({.bound = 1});
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], "last words");
  ranks[1].close();
  post_text(ranks[0]);
  CHECK(text_of(ranks[0].wait().part(1, 0)) == "last words");
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPeerClosed,
                "rank 1 closed the channel while this rank waited for it to send");
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
