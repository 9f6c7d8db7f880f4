// The verbs transport over the fake: what a device reports, from a completion's status to a lack of
// memory, and what becomes of it.

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "channel/protocol.h"
#include "tests/support/random_exchange.h"
#include "tests/verbs/verbs_ranks.h"
#include "transport/mixed_transport.h"
#include "transport/verbs/device/verbs_status.h"

using namespace bls;
using namespace bls::testing;

namespace {

using std::chrono::milliseconds;

/// Ranks over one fake, whose connections a test can break.
struct FakeRanks {
  explicit FakeRanks(const Setup& setup, const FakeDevice& device = {}, uint64_t seed = 1)
      : library(std::make_shared<FakeIbverbs>(std::vector{device}, seed)) {
    Transports transports;
    for (auto& rank : connected(library, setup)) {
      addresses.push_back(rank->address());
      contexts.push_back(rank->device().context());
      transports.push_back(std::move(rank));
    }
    ranks.emplace(setup, std::move(transports));
  }

  Channel& operator[](int rank) { return (*ranks)[rank]; }
  /// Number of the queue pair of `rank` for `peer`.
  uint32_t pair(int rank, int peer) const {
    return addresses[static_cast<size_t>(rank)].queue_pairs[static_cast<size_t>(peer)];
  }

  std::shared_ptr<FakeIbverbs> library;
  std::vector<VerbsAddress> addresses;
  std::vector<ibv_context*> contexts;
  std::optional<Ranks> ranks;
};

void post_text(Channel& channel, const std::string& text = "text") {
  Outgoing outgoing(channel.config().world_size);
  for (int rank = 0; rank < channel.config().world_size; ++rank) {
    if (rank != channel.config().rank) outgoing.add(rank, bytes_of(text));
  }
  channel.post(outgoing.messages());
}

void check_failure(const std::optional<Failure>& failure, ErrorKind kind, const std::string& text) {
  REQUIRE(failure);
  CHECK_MESSAGE(failure->kind == kind, failure->message);
  CHECK_MESSAGE(failure->message.find(text) != std::string::npos, failure->message);
}

/// Poison leaves a rank within its grace, and may take longer to arrive.
void check_poisoned(FakeRanks& ranks, int rank, const std::string& text) {
  Transport& transport = ranks.ranks->transport(rank);
  const auto end = Clock::now() + std::chrono::minutes(2);
  while (transport.poisoned().load() == 0 && Clock::now() < end) std::this_thread::yield();
  check_failure(failure_of([&] { post_text(ranks[rank]); }), ErrorKind::kPoisoned, text);
}

/// Why a transport cannot be made.
std::optional<Failure> refusal(const FakeDevice& device, const VerbsConfig& config = {},
                               const RingShape& shape = {.world_size = 2}) {
  const auto library = std::make_shared<FakeIbverbs>(std::vector{device});
  return failure_of(
      [&] { VerbsTransport(library, config, shape, std::chrono::seconds(1), others(shape)); });
}

ibv_gid_entry gid(uint32_t index, ibv_gid_type type, bool ipv4) {
  ibv_gid_entry entry{};
  entry.gid.raw[0] = static_cast<uint8_t>(ipv4 ? 0 : 0xfe);
  if (ipv4) entry.gid.raw[10] = entry.gid.raw[11] = 0xff;
  entry.gid.raw[15] = static_cast<uint8_t>(index + 1);
  entry.gid_index = index;
  entry.port_num = 1;
  entry.gid_type = type;
  return entry;
}

/// Whether `end` ends a sleep of rank 0, which otherwise is a long one.
bool ends_sleep(Transports& ranks, const std::function<void()>& end) {
  Transport& sleeper = *ranks[0];
  const auto ready = [](void* transport) {
    auto& own = *static_cast<Transport*>(transport);
    own.progress();
    for (int source = 1; source < 3; ++source) {
      if (arrival_word(own.inbox(source, 0)).load() != 0) return true;
    }
    return false;
  };
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(50));  // the sleep has begun by then
    end();
  });
  const auto limit = Clock::now() + std::chrono::minutes(8);
  sleeper.sleep(ready, &sleeper, limit);
  other.join();
  return Clock::now() < limit;
}

}  // namespace

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

TEST_CASE("a sequence number of which only the low bits travel") {
  // Past 2^32 messages nobody waits here, but the arithmetic is that of every other message.
  FakeRanks ranks({});
  for (int i = 0; i < 40; ++i) {
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::to_string(i));
    for (int rank = 0; rank < 2; ++rank) {
      const Arrival& arrival = ranks[rank].wait();
      CHECK(arrival.sequence() == static_cast<uint64_t>(i));
      CHECK(text_of(arrival.part(1 - rank, 0)) == std::to_string(i));
      ranks[rank].release();
    }
  }
}

TEST_CASE("messages longer than the port's longest are sent in pieces") {
  FakeDevice device;
  device.max_message = 1000;
  FakeRanks ranks({.world_size = 3, .bound = 1, .slot_bytes = 8192}, device);
  ranks.ranks->run([](int rank, Channel& channel) {
    random_exchange(rank, channel, {.largest_part = 2000, .most_parts = 3, .oversized_every = 5},
                    60);
  });
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

TEST_CASE("without inline data, and with as much as a device has") {
  for (const uint32_t most : {8u, 100u, 4096u}) {
    CAPTURE(most);
    FakeDevice device;
    device.max_inline = most;
    FakeRanks ranks({.world_size = 2, .bound = 1}, device);
    ranks.ranks->run([](int rank, Channel& channel) { random_exchange(rank, channel, {}, 60); });
  }
}

TEST_CASE("connections overtake each other") {
  FakeRanks ranks({.world_size = 3, .bound = 2});
  // Rank 1 is heard of two messages late, at rank 0 alone.
  ranks.library->hold(ranks.pair(1, 0), true);
  for (int i = 0; i < 3; ++i) {
    for (int rank = 0; rank < 3; ++rank) post_text(ranks[rank], std::to_string(rank * 10 + i));
  }
  for (int i = 0; i < 3; ++i) ranks.ranks->arrived(0, 2, static_cast<uint64_t>(i));
  CHECK(arrival_word(ranks.ranks->transport(0).inbox(1, 0)).load() == 0);
  ranks.library->hold(ranks.pair(1, 0), false);
  for (int i = 0; i < 3; ++i) {
    const Arrival& arrival = ranks[0].wait();
    CHECK(text_of(arrival.part(1, 0)) == std::to_string(10 + i));
    CHECK(text_of(arrival.part(2, 0)) == std::to_string(20 + i));
    ranks[0].release();
  }
}

TEST_CASE("a message and a wake-up end a sleep") {
  const Setup setup{.world_size = 3};
  for (const MakeTransports& make :
       {MakeTransports(verbs_transports), MakeTransports(mixed_transports)}) {
    for (const int sender : {1, 2}) {
      // With ranks on two hosts rank 1 shares memory with rank 0, and rank 2 does not.
      CAPTURE(sender);
      Transports ranks = make(setup);
      Transport& other = *ranks[static_cast<size_t>(sender)];
      CHECK(ends_sleep(ranks, [&] { other.deliver(0, other.outbox(0, 0), 64, 0); }));
    }
    Transports ranks = make(setup);
    CHECK(ends_sleep(ranks, [&] { ranks[0]->wake_self(); }));
  }
}

TEST_CASE("an outbox is not written before the device has completed what stands there") {
  // Rank 0's messages are all read, and only the device has not heard of it: the fourth post needs
  // the slot of the second.
  Setup setup{.world_size = 2, .bound = 0, .deadline = std::chrono::seconds(2)};
  FakeRanks ranks(setup);
  for (int i = 0; i < 2; ++i) {
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::to_string(i));
    for (int rank = 0; rank < 2; ++rank) {
      ranks.ranks->arrived(rank, 1 - rank, static_cast<uint64_t>(i));
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
  auto& transport = ranks.ranks->transport(0);
  std::byte* const slot = transport.outbox(1, 0);
  ranks.library->hold(ranks.pair(0, 1), true);
  transport.deliver(1, slot, 64, 2);
  const auto failure = failure_of([&] { transport.outbox(1, 0); });
  check_failure(failure, ErrorKind::kTransport, "did not complete a message to rank 1");
  ranks.library->hold(ranks.pair(0, 1), false);
  CHECK(transport.outbox(1, 0) == slot);
}

TEST_CASE("a send queue takes what it was made for and not one request more") {
  const auto library = std::make_shared<FakeIbverbs>();
  const VerbsDevice device(library, {});
  auto* const channel = library->create_comp_channel(device.context());
  auto* const completions = library->create_cq(device.context(), 100, channel);
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = 1;
  auto* const receives = library->create_srq(device.domain(), &attributes);
  {
    VerbsQueue queue(device, completions, receives, 4, 7);
    queue.connect({device.gid(), 0, 1024, queue.number(), 0}, 0);
    library->hold(queue.number(), true);
    std::array<ibv_send_wr, 3> requests{};
    std::array<ibv_sge, 3> pieces{};
    for (size_t i = 0; i < 3; ++i) {
      requests[i].opcode = IBV_WR_RDMA_WRITE;
      requests[i].sg_list = &pieces[i];
      requests[i].num_sge = 1;
    }
    CHECK(queue.post(requests, 1) == 0);
    CHECK(queue.in_flight() == 3);
    CHECK_THROWS_AS(queue.post({requests.data(), 2}, 2), std::logic_error);
    CHECK(queue.post({requests.data(), 1}, 2) == 0);
    CHECK(queue.in_flight() == 4);
    // Only its own completions, in order.
    CHECK_THROWS_AS(queue.retire((uint64_t{7} << 32) + 1), std::logic_error);
    CHECK(queue.retire(uint64_t{7} << 32).tag == 1);
    CHECK(queue.in_flight() == 1);
    CHECK(queue.retire((uint64_t{7} << 32) + 1).tag == 2);
    CHECK_THROWS_AS(queue.retire((uint64_t{7} << 32) + 2), std::logic_error);
  }
  library->destroy_srq(receives);
  library->destroy_cq(completions);
  library->destroy_comp_channel(channel);
}

TEST_CASE("what can be under way fits the queues for any number of slots") {
  // With as few slots as are safe every release is told, and oversized messages are read.
  for (const uint32_t bound : {0u, 1u, 3u}) {
    CAPTURE(bound);
    FakeRanks ranks({.world_size = 3, .bound = bound, .slots = bound + 1, .slot_bytes = 512});
    ranks.ranks->run([](int rank, Channel& channel) {
      random_exchange(rank, channel, {.most_parts = 3, .oversized_every = 3}, 200);
    });
    CHECK(ranks.library->fullest_send_queue() > 1);
  }
}

TEST_CASE("memory of a large message that is not there is an error and not its bytes") {
  FakeRanks ranks({.slot_bytes = kMinSlotBytes});
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::string(10000, 'x'));
  std::byte* const slot = ranks.ranks->arrived(1, 0, 0);
  std::byte* const at = slot + header_bytes(1);
  MemoryAddress address;
  std::memcpy(&address, at, sizeof(address));
  SUBCASE("another address") { address.where[0] += 1 << 20; }
  SUBCASE("another key") { address.where[1] += 1000; }
  SUBCASE("more than there is") {
    address.bytes += 4096;
    std::memcpy(slot + header_bytes(0), &address.bytes, sizeof(address.bytes));
  }
  std::memcpy(at, &address, sizeof(address));
  check_failure(failure_of([&] { ranks[1].wait(); }), ErrorKind::kTransport,
                "rank 0 is lost, and this rank waited for it to be read: fake0 port 1: it refused "
                "access to its memory");
  // The other side hears of it by poison or by the event, whichever is first.
  const auto failure = failure_of([&] {
    ranks[0].wait();
    post_text(ranks[0]);
  });
  CHECK(failure);
}

TEST_CASE("a large message has the bytes that docs/wire-format.md shows") {
  FakeRanks ranks({.bound = 1, .slot_bytes = kMinSlotBytes});
  for (int i = 0; i < 4; ++i) {
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank]);
    for (int rank = 0; rank < 2 && i < 3; ++rank) {
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
  post_text(ranks[0], std::string(10000, 'x'));
  const std::byte* const slot = ranks.ranks->arrived(1, 0, 4);
  std::array<uint64_t, 8> words;
  std::memcpy(words.data(), slot, sizeof(words));
  CHECK(words[0] == 5);
  CHECK(words[1] == 0x0001'0000'0102'b15a);
  CHECK(words[2] == 3);
  CHECK(words[3] == 10000);
  CHECK(words[4] % 64 == 0);
  CHECK(*reinterpret_cast<const char*>(words[4]) == 'x');  // both ranks are in one process
  CHECK(words[5] <= UINT32_MAX);
  CHECK(words[6] == 0);
  CHECK(words[7] == 10000);
  // Closing would wait for it to be read.
  post_text(ranks[1]);
  for (int i = 0; i < 2; ++i) {
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
}

TEST_CASE("reading a large message ends at the deadline") {
  FakeRanks ranks({.slot_bytes = kMinSlotBytes, .deadline = milliseconds(100)});
  for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::string(10000, 'x'));
  for (int rank = 0; rank < 2; ++rank) ranks.ranks->arrived(rank, 1 - rank, 0);
  ranks.library->hold(ranks.pair(1, 0), true);
  check_failure(failure_of([&] { ranks[1].wait(); }), ErrorKind::kTimeout,
                "rank 0 sent a message that cannot be read: fake0 port 1: reading 10000 bytes");
}

TEST_CASE("an interrupt ends the waits for a device, and all ranks are told") {
  const Setup setup{.slot_bytes = kMinSlotBytes,
                    .deadline = std::chrono::minutes(10),
                    .interrupt = [] { throw Interruption("struck"); }};
  const auto check_struck = [](const std::optional<Failure>& failure) {
    REQUIRE(failure);
    CHECK_MESSAGE((!failure->kind && failure->message == "struck"), failure->message);
  };
  const auto name = "because rank 0 failed: channel 'tested' on rank 0, sequence 0, lag 0: struck";
  SUBCASE("in reading a large message") {
    FakeRanks ranks(setup);
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::string(10000, 'x'));
    for (int rank = 0; rank < 2; ++rank) ranks.ranks->arrived(rank, 1 - rank, 0);
    ranks.library->hold(ranks.pair(0, 1), true);
    check_struck(failure_of([&] { ranks[0].wait(); }));
    ranks.library->hold(ranks.pair(0, 1), false);
    check_poisoned(ranks, 1, name);
  }
  SUBCASE("in what still has to leave at a close") {
    FakeRanks ranks(setup);
    ranks.library->hold(ranks.pair(0, 1), true);
    post_text(ranks[0]);
    check_struck(failure_of([&] { ranks[0].close(); }));
    CHECK(ranks[0].closed());
    ranks.library->hold(ranks.pair(0, 1), false);
    check_poisoned(ranks, 1, name);
  }
  SUBCASE("in a post whose slot is still in use") {
    FakeRanks ranks(setup);
    for (int i = 0; i < 2; ++i) {
      for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::to_string(i));
      for (int rank = 0; rank < 2; ++rank) {
        ranks.ranks->arrived(rank, 1 - rank, static_cast<uint64_t>(i));
        ranks[rank].wait();
        ranks[rank].release();
      }
    }
    auto& transport = ranks.ranks->transport(0);
    std::byte* const slot = transport.outbox(1, 0);
    ranks.library->hold(ranks.pair(0, 1), true);
    transport.deliver(1, slot, 64, 2);
    check_struck(failure_of([&] { post_text(ranks[0]); }));
    ranks.library->hold(ranks.pair(0, 1), false);
    check_poisoned(ranks, 1, "because rank 0 failed: ");
  }
}

TEST_CASE("each reason why no device can be used is told with its cure") {
  FakeDevice device;
  ErrorKind kind = ErrorKind::kRendezvous;
  std::string text;
  VerbsConfig config;
  RingShape shape{.world_size = 2};
  SUBCASE("another device") {
    config.device = "mlx5_7";
    text = "there is no RDMA device mlx5_7 on this host, only fake0";
  }
  SUBCASE("no permission") {
    device.open_error = EACCES;
    text = "fake0: no permission to open /dev/infiniband/uverbs0: give the user";
  }
  SUBCASE("cannot be opened") {
    device.open_error = ENODEV;
    text = "fake0: cannot open /dev/infiniband/uverbs0: No such device";
  }
  SUBCASE("ports down") {
    device.ports = {IBV_PORT_DOWN, IBV_PORT_INIT};
    text = "fake0: port 1 is down, port 2 is initializing";
  }
  SUBCASE("this port down") {
    device.ports = {IBV_PORT_ACTIVE, IBV_PORT_DOWN};
    config.port = 2;
    text = "fake0: port 2 is down. Bring the link up";
  }
  SUBCASE("no such port") {
    config.port = 2;
    text = "fake0: has no port 2, only 1";
  }
  SUBCASE("no GID") {
    device.gids = {gid(0, IBV_GID_TYPE_ROCE_V2, true)};
    device.gids[0].port_num = 2;
    text = "fake0: port 1 has no GID: give its network interface an IP address";
  }
  SUBCASE("no GID there") {
    config.gid_index = 9;
    text = "fake0: port 1 has no GID at index 9";
  }
  SUBCASE("too many slots") {
    device.max_srq_wr = 20;
    shape.slots = 8;
    text = "fake0 port 1 has queues of at most 20 receives (max_srq_wr), and 24 are needed: lower";
  }
  SUBCASE("too many requests") {
    device.max_qp_wr = 20;
    shape.slots = 8;
    text = "at most 20 requests (max_qp_wr), and 29 are needed: lower the bound";
  }
  SUBCASE("too many connections") {
    device.create_error = ENOMEM;
    text = "fake0 port 1: cannot create a queue pair for 11 requests, which a lower bound makes";
  }
  SUBCASE("no memory") {
    device.register_error = EFAULT;
    text = "fake0 port 1: cannot register 1 MiB for 2 x 2 slots of 4224 bytes on rank 0: Bad addr";
  }
  const auto failure = refusal(device, config, shape);
  check_failure(failure, kind, text);
}

TEST_CASE("slots whose bytes cannot be counted are refused") {
  const auto failure = refusal({}, {}, {.world_size = 2, .slot_bytes = size_t{1} << 62});
  REQUIRE(failure);
  CHECK(!failure->kind);  // a caller's mistake
  CHECK(failure->message.find("slot_bytes is 4611686018427387904") == 0);
}

TEST_CASE("a library that cannot prepare for forks is told of") {
  for (const int error : {0, EINVAL}) {
    FakeDevice device;
    device.fork_error = error;
    const VerbsDevice opened(std::make_shared<FakeIbverbs>(std::vector{device}), {});
    CHECK(opened.fork_hazard() == (error == 0 ? "" : std::strerror(error)));
  }
}

TEST_CASE("a forked child that gives up a transport has none of its descriptors") {
  const auto library = std::make_shared<FakeIbverbs>();
  auto ranks = connected(library, Setup{});
  const auto descriptors = [] {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
      if (target.find("[eventfd]") != target.npos) ++count;
    }
    return count;
  };
  REQUIRE(descriptors() == 8);  // each rank's device (two), its events and its wake-up
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    for (auto& rank : ranks) rank->abandon();
    _exit(descriptors());
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("the limit of locked memory is named with its cure") {
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_MEMLOCK, &before) == 0);
  rlimit low = before;
  low.rlim_cur = 64 * 1024;
  REQUIRE(setrlimit(RLIMIT_MEMLOCK, &low) == 0);
  FakeDevice device;
  device.register_error = ENOMEM;
  const auto failure = refusal(device);
  setrlimit(RLIMIT_MEMLOCK, &before);
  check_failure(failure, ErrorKind::kRendezvous,
                "the limit of locked memory is 64 KiB (RLIMIT_MEMLOCK). Raise it: ulimit -l");
}

TEST_CASE("a host without a device says so") {
  const auto library = std::make_shared<FakeIbverbs>(std::vector<FakeDevice>{});
  check_failure(failure_of([&] { VerbsDevice(library, {}); }), ErrorKind::kRendezvous,
                "this host has no RDMA device");
}

TEST_CASE("the first device with an active port is used, on InfiniBand by LID") {
  std::vector<FakeDevice> devices(3);
  devices[0].name = "down0";
  devices[0].ports = {IBV_PORT_DOWN};
  devices[1].name = "ib0";
  devices[1].ports = {IBV_PORT_DOWN, IBV_PORT_ACTIVE};
  devices[1].link_layer = IBV_LINK_LAYER_INFINIBAND;
  const VerbsDevice device(std::make_shared<FakeIbverbs>(devices), {});
  CHECK(device.label() == "ib0 port 2");
  CHECK_FALSE(device.global());
  CHECK(device.port_attributes().lid == 2);
}

TEST_CASE("of the GIDs of a RoCE port a routed one is used, IPv4 before IPv6") {
  FakeDevice fake;
  int expected = 0;
  SUBCASE("both") {
    fake.gids = {gid(0, IBV_GID_TYPE_ROCE_V1, false), gid(1, IBV_GID_TYPE_ROCE_V2, false),
                 gid(2, IBV_GID_TYPE_ROCE_V1, true), gid(3, IBV_GID_TYPE_ROCE_V2, true),
                 gid(4, IBV_GID_TYPE_ROCE_V2, true)};
    expected = 3;
  }
  SUBCASE("IPv6 alone") {
    fake.gids = {gid(0, IBV_GID_TYPE_ROCE_V1, false), gid(1, IBV_GID_TYPE_ROCE_V2, false)};
    expected = 1;
  }
  SUBCASE("RoCE v1 alone") { fake.gids = {gid(0, IBV_GID_TYPE_ROCE_V1, false)}; }
  const VerbsDevice device(std::make_shared<FakeIbverbs>(std::vector{fake}), {});
  CHECK(device.config().gid_index == expected);
  CHECK(device.gid().raw[15] == expected + 1);
  CHECK(device.global());
}

TEST_CASE("a connection that cannot be made is told with its cure") {
  FakeDevice device;
  device.connect_error = ENETUNREACH;
  check_failure(
      failure_of([&] { FakeRanks ranks({}, device); }), ErrorKind::kRendezvous,
      "rank 1: RDMA device fake0 port 1: cannot connect (to receive) a queue pair: Network "
      "is unreachable. Its GID must be reachable from this device");
}

TEST_CASE("the smaller packets of two configurations are used") {
  const auto library = std::make_shared<FakeIbverbs>();  // which refuses two sizes
  Transports transports;
  std::vector<VerbsAddress> addresses;
  std::vector<VerbsTransport*> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    const RingShape shape{.rank = rank, .world_size = 2};
    VerbsConfig config;
    if (rank == 1) config.mtu = 256;
    auto made = std::make_unique<VerbsTransport>(library, config, shape, milliseconds(10000),
                                                 others(shape));
    addresses.push_back(made->address());
    ranks.push_back(made.get());
    transports.push_back(std::move(made));
  }
  CHECK(addresses[0].mtu == 1024);
  CHECK(addresses[1].mtu == 256);
  for (VerbsTransport* const rank : ranks) rank->connect(addresses);
  Ranks channels({}, std::move(transports));
  channels.run([](int rank, Channel& channel) { random_exchange(rank, channel, {}, 10); });
}

TEST_CASE("hosts with different numbers of ranks are joined") {
  // Ranks that reach more others have more places, and their slots start elsewhere.
  for (const auto& hosts : {std::vector{0, 0, 0, 1}, {0, 1, 1, 1, 1}, {0, 0, 0, 0, 0, 0, 0, 1}}) {
    const Setup setup{.world_size = static_cast<int>(hosts.size()), .bound = 1};
    CAPTURE(setup.world_size);
    Ranks ranks(setup, transports_on_hosts(setup, hosts));
    ranks.run([](int rank, Channel& channel) {
      random_exchange(rank, channel, {.most_parts = 4, .oversized_every = 8}, 40);
    });
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
  const auto end = Clock::now() + std::chrono::minutes(2);
  while (ranks.transport(0).poisoned().load() == 0 && Clock::now() < end) {
    std::this_thread::yield();
  }
  SUBCASE("passed on by a rank that fails as well") { ranks[0].poison("the second"); }
  SUBCASE("passed on by a rank that only hears of it") {
    check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kPoisoned, "rank 2 failed");
  }
  const auto failure = failure_of([&] { post_text(ranks[1]); });
  check_failure(failure, ErrorKind::kPoisoned, "stopped because rank 2 failed: ");
  check_failure(failure, ErrorKind::kPoisoned, "the first");
  CHECK(failure->message.find("rank 0 failed") == std::string::npos);
}

TEST_CASE("an inbox of another shape is refused") {
  const auto library = std::make_shared<FakeIbverbs>();
  const RingShape small{.rank = 0, .world_size = 2};
  const RingShape large{.rank = 1, .world_size = 2, .slot_bytes = 65536};
  VerbsTransport first(library, {}, small, milliseconds(100), others(small));
  VerbsTransport second(library, {}, large, milliseconds(100), others(large));
  std::array addresses{first.address(), second.address()};
  check_failure(failure_of([&] { second.connect(addresses); }), ErrorKind::kProtocol,
                "rank 0 announced an inbox of");
  addresses[1].places.clear();
  check_failure(failure_of([&] { first.connect(addresses); }), ErrorKind::kProtocol,
                "rank 1 announced an inbox of");
}

TEST_CASE("a poison word that is damaged is still poison") {
  FakeRanks ranks({});
  const_cast<std::atomic<uint32_t>&>(ranks.ranks->transport(0).poisoned()).store(99);
  check_failure(failure_of([&] { post_text(ranks[0]); }), ErrorKind::kPoisoned,
                "rank 98 failed: its number is damaged");
}

TEST_CASE("random exchanges over networks of many tempers") {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    CAPTURE(seed);
    FakeRanks ranks({.world_size = 4, .bound = 1, .slot_bytes = 1024}, {}, seed);
    ranks.ranks->run([](int rank, Channel& channel) {
      random_exchange(rank, channel, {.most_parts = 4, .oversized_every = 8}, 60);
    });
  }
}

TEST_SUITE_END();
