// Messages over the fake: pieces, queues that never overflow, connections that overtake each other,
// and sleeps.

#include <doctest/doctest.h>

#include <functional>
#include <thread>

#include "tests/support/random_exchange.h"
#include "tests/verbs/fake_ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

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
  std::byte* const slot = leave_outbox_in_use(ranks);
  Transport& transport = ranks.ranks->transport(0);
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
