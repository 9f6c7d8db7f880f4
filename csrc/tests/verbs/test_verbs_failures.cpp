// What a device reports, from a completion's status to an event, and what becomes of it on all
// ranks.

#include <doctest/doctest.h>

#include "tests/support/random_exchange.h"
#include "tests/verbs/fake_ranks.h"
#include "transport/mixed/mixed_transport.h"

using namespace bls;
using namespace bls::testing;

TEST_SUITE_BEGIN("verbs");

TEST_CASE("a request that fails is an error on all ranks that says what happened and to whom") {
  struct Case {
    ibv_wc_status status;
    ErrorKind kind;
    std::string text;
  };
  const Case cases[] = {
      {IBV_WC_RETRY_EXC_ERR, ErrorKind::kPeerDied, "it does not answer"},
      {IBV_WC_RNR_RETRY_EXC_ERR, ErrorKind::kTransport, "it has no receive posted"},
      {IBV_WC_REM_ACCESS_ERR, ErrorKind::kTransport, "it refused access to its memory"},
      {IBV_WC_REM_INV_REQ_ERR, ErrorKind::kTransport, "it refused a request as invalid"},
      {IBV_WC_REM_OP_ERR, ErrorKind::kTransport, "it could not complete a request"},
      {IBV_WC_WR_FLUSH_ERR, ErrorKind::kTransport, "the connection was ended"},
      {IBV_WC_LOC_PROT_ERR, ErrorKind::kTransport, "the own device refused a request"},
      {IBV_WC_FATAL_ERR, ErrorKind::kTransport, "the device failed"},
      {IBV_WC_BAD_RESP_ERR, ErrorKind::kTransport, "a request failed (status "},
  };
  for (const Case& expected : cases) {
    CAPTURE(expected.text);
    FakeRanks ranks({.world_size = 3});
    ranks.library->fail_next(ranks.pair(0, 1), expected.status);
    post_text(ranks[0]);
    const auto failure = failure_of([&] { ranks[0].wait(); });
    check_failure(failure, expected.kind, "on rank 0, sequence 0, lag 0: rank 1 is lost");
    check_failure(failure, expected.kind, "fake0 port 1: " + expected.text);
    check_poisoned(ranks, 2, expected.text);
  }
}

TEST_CASE("what a peer sent before its connection failed counts") {
  FakeRanks ranks({.bound = 1});
  post_text(ranks[1], "last words");
  ranks.ranks->arrived(0, 1, 0);
  ranks.library->fail_next(ranks.pair(0, 1), IBV_WC_RETRY_EXC_ERR);
  post_text(ranks[0]);
  CHECK(text_of(ranks[0].wait().part(1, 0)) == "last words");
  post_text(ranks[0]);
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPeerDied, "does not answer");
}

TEST_CASE("the last message of a peer that closes meanwhile is not taken for missing") {
  FakeRanks ranks(Setup{});
  post_text(ranks[0]);
  // Rank 0 has looked for messages, and looks for the closing word next.
  ranks.library->at_next_look_for_events(ranks.contexts[0], [&] {
    post_text(ranks[1], "the last");
    ranks[1].close();
  });
  Transport& transport = ranks.ranks->transport(0);
  const PeerState state = transport.peer_state(1);
  const bool arrived = arrival_word(transport.inbox(1, 0)).load() == 1;
  CHECK((state == PeerState::kOpen || arrived));
  CHECK(text_of(ranks[0].wait().part(1, 0)) == "the last");
  CHECK(transport.peer_state(1) == PeerState::kClosed);
}

TEST_CASE("a dead peer is noticed by a rank that has nothing to send") {
  // Noticed within seconds, and a minute may pass on a machine that does something else.
  FakeRanks ranks({.world_size = 3, .bound = 1, .deadline = std::chrono::minutes(8)});
  for (int rank = 0; rank < 3; ++rank) post_text(ranks[rank]);
  ranks[0].wait();
  post_text(ranks[0]);
  for (const int peer : {1, 2}) ranks.ranks->arrived(peer, 0, 1);
  ranks.library->kill(ranks.contexts[1]);
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kPeerDied, "rank 1 is lost");
  check_poisoned(ranks, 2, "rank 1 is lost");
}

TEST_CASE("where the own port is down, no peer is blamed") {
  for (const auto status : {IBV_WC_RETRY_EXC_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_WR_FLUSH_ERR}) {
    CAPTURE(status);
    FakeRanks ranks({});
    ranks.library->set_port_state(ranks.contexts[0], IBV_PORT_DOWN);
    ranks.library->fail_next(ranks.pair(0, 1), status);
    post_text(ranks[0]);
    check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kTransport,
                  "fake0 port 1: the port is down");
  }
}

TEST_CASE("events of the device end what they concern") {
  struct Case {
    ibv_event_type type;
    bool of_pair;
    std::string text;
  };
  const Case cases[] = {
      {IBV_EVENT_DEVICE_FATAL, false, "the device failed or was removed"},
      {IBV_EVENT_CQ_ERR, false, "a completion queue overflowed"},
      {IBV_EVENT_SRQ_ERR, false, "a receive queue failed"},
      {IBV_EVENT_QP_ACCESS_ERR, true, "it wanted memory that this rank does not offer"},
      {IBV_EVENT_QP_REQ_ERR, true, "it sent a request that is invalid"},
      {IBV_EVENT_QP_FATAL, true, "the connection failed"},
  };
  for (const Case& expected : cases) {
    CAPTURE(expected.text);
    FakeRanks ranks({.world_size = 3});
    ranks.library->raise(ranks.contexts[0], IBV_EVENT_PORT_ACTIVE);  // of no consequence
    ranks.library->raise(ranks.contexts[0], expected.type, expected.of_pair ? ranks.pair(0, 2) : 0);
    post_text(ranks[0]);
    const auto failure = failure_of([&] { ranks[0].wait(); });
    check_failure(failure, ErrorKind::kTransport, expected.text);
    if (expected.of_pair) check_failure(failure, ErrorKind::kTransport, "rank 2 is lost");
  }
}

TEST_CASE("a port that was down for a moment is of no consequence") {
  FakeRanks ranks({});
  ranks.library->raise(ranks.contexts[0], IBV_EVENT_PORT_ERR);
  ranks.library->raise(ranks.contexts[0], IBV_EVENT_PORT_ACTIVE);
  ranks.ranks->run([](int rank, Channel& channel) { random_exchange(rank, channel, {}, 50); });
}

TEST_CASE("a message that is not the next one of its sender is refused") {
  FakeRanks ranks({});
  ranks.library->forge_arrival(ranks.pair(0, 1), 5);
  post_text(ranks[0]);
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kTransport,
                "it announced message 5 where 0 was due");
}

TEST_CASE("a piece of a message that fails ends the connection, and the message never arrives") {
  FakeDevice device;
  device.max_message = 1000;
  FakeRanks ranks({.world_size = 3, .slot_bytes = 8192}, device);
  ranks.library->fail_next(ranks.pair(0, 1), IBV_WC_REM_OP_ERR);  // the first of four, unsignaled
  post_text(ranks[0], std::string(3500, 'x'));
  check_failure(failure_of([&] { ranks[0].wait(); }), ErrorKind::kTransport,
                "it could not complete a request");
  ranks.ranks->arrived(2, 0, 0);
  check_poisoned(ranks, 2, "rank 1 is lost");
  CHECK(arrival_word(ranks.ranks->transport(1).inbox(0, 0)).load() == 0);
}

TEST_CASE("a device that refuses to go on is an error on all ranks") {
  struct Case {
    FakeIbverbs::Call call;
    std::string text;
  };
  const Case cases[] = {
      // A full send queue: pieces of the message are taken, and the last one is not.
      {FakeIbverbs::Call::kPostSend, "fake0 port 1: the device takes no request: Cannot allocate"},
      {FakeIbverbs::Call::kPostReceive, "fake0 port 1: the device takes no receive: Cannot alloc"},
      {FakeIbverbs::Call::kPoll, "fake0 port 1: the completion queue failed"},
  };
  FakeDevice device;
  device.max_message = 1000;
  for (const Case& expected : cases) {
    CAPTURE(expected.text);
    FakeRanks ranks({.slot_bytes = 8192}, device);
    ranks.library->refuse_next(ranks.contexts[0], expected.call);
    const auto failures = ranks.ranks->outcomes([](int, Channel& channel) {
      // Receives are posted many at a time.
      for (int i = 0; i < 100; ++i) {
        post_text(channel, std::string(3500, 'x'));
        channel.wait();
        channel.release();
      }
    });
    check_failure(failures[0], ErrorKind::kTransport, expected.text);
    check_failure(failures[1], ErrorKind::kPeerDied, "rank 0 is lost");
  }
}

TEST_CASE("a failure keeps its origin on its way through another host's memory") {
  // Ranks 0 and 1 on a host, rank 2 alone, and rank 1 hears nothing of it over the network.
  const Setup setup{.world_size = 3};
  const auto library = std::make_shared<FakeIbverbs>();
  auto verbs = connected(library, setup, {}, [](const RingShape& shape) {
    return shape.rank == 2 ? std::vector{0, 1} : std::vector{2};
  });
  library->hold(verbs[2]->address().queue_pairs[1], true);
  Setup host = setup;
  host.world_size = 2;
  auto shm = shm_mesh(host);
  Transports transports;
  for (size_t rank = 0; rank < 2; ++rank) {
    transports.push_back(std::make_unique<MixedTransport>(
        std::move(shm[rank]), std::move(verbs[rank]), std::vector{0, 1}, setup.world_size));
  }
  transports.push_back(std::move(verbs[2]));
  Ranks ranks(setup, std::move(transports));
  ranks[2].poison("the first");
  await_poison(ranks.transport(0));
  SUBCASE("passed on by a rank that fails as well") { ranks[0].poison("the second"); }
  SUBCASE("passed on by a rank that only hears of it") {
    check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kPoisoned, "rank 2 failed");
  }
  const auto failure = failure_of([&] { post_text(ranks[1]); });
  check_failure(failure, ErrorKind::kPoisoned, "stopped because rank 2 failed: ");
  check_failure(failure, ErrorKind::kPoisoned, "the first");
  CHECK(failure->message.find("rank 0 failed") == std::string::npos);
}

TEST_CASE("a poison word that is damaged is still poison") {
  FakeRanks ranks({});
  const_cast<std::atomic<uint32_t>&>(ranks.ranks->transport(0).poisoned()).store(99);
  check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kPoisoned,
                "rank 98 failed: its number is damaged");
}

TEST_SUITE_END();
