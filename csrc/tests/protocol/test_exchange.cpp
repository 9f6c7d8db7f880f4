#include <doctest/doctest.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "channel/call_label.h"
#include "tests/support/payload.h"
#include "tests/support/random_exchange.h"
#include "tests/support/ranks.h"
#include "tests/support/transport_under_test.h"

using namespace bls;
using namespace bls::testing;

namespace {

void exchange_at_random(const Setup& setup, const Sizes& sizes) {
  CAPTURE(setup.world_size);
  CAPTURE(setup.bound);
  CAPTURE(setup.slots);
  CAPTURE(sizes.oversized_every);
  Ranks ranks(setup);
  const uint64_t iterations = setup.world_size > 4 ? 25 : 60;
  REQUIRE_NOTHROW(ranks.run(
      [&](int rank, Channel& channel) { random_exchange(rank, channel, sizes, iterations); }));
}

/// Writes bytes of which nobody else knows how many they are.
class Made final : public BlockWriter {
 public:
  explicit Made(Bytes bytes) : bytes_(std::move(bytes)) {}

  size_t write(std::byte* to, size_t room) const override {
    if (bytes_.size() <= room) std::copy(bytes_.begin(), bytes_.end(), to);
    return bytes_.size();
  }
  std::string text() const { return text_of({bytes_.data(), bytes_.size()}); }

 private:
  Bytes bytes_;
};

/// A part of `bytes` bytes, of which `least` are known before, and one that has it among others.
struct MadeMessage {
  MadeMessage(size_t bytes, size_t least)
      : made(stamped(bytes, bytes)),
        blocks{{tail.data(), tail.size()}, {nullptr, least, 1, 0, &made}, {tail.data(), 1, 3, 2}},
        parts{Part(&blocks[1], 1), Part(blocks)} {}

  void check(const Arrival& arrival, int source) const {
    REQUIRE(arrival.parts(source).size() == 2);
    CHECK(text_of(arrival.part(source, 0)) == made.text());
    CHECK(text_of(arrival.part(source, 1)) == "abcdef" + made.text() + "ace");
  }

  const Bytes tail = bytes_of("abcdef");
  const Made made;
  const Block blocks[3];
  const Part parts[2];
};

/// Cannot write what it should.
class Broken final : public BlockWriter {
 public:
  size_t write(std::byte*, size_t) const override { throw std::runtime_error("no such row"); }
};

}  // namespace

TEST_CASE("messages arrive byte for byte, whatever the order of posts, waits and releases") {
  for (const int world_size : {1, 2, 3, 5, 8, 16}) {
    for (const uint32_t bound : {0u, 1u, 2u, 4u}) {
      exchange_at_random({.world_size = world_size, .bound = bound, .slot_bytes = 8192}, {});
    }
  }
}

TEST_CASE("messages larger than a slot arrive byte for byte among others") {
  for (const int world_size : {2, 3, 8}) {
    for (const uint32_t bound : {0u, 1u, 2u}) {
      exchange_at_random({.world_size = world_size, .bound = bound, .slot_bytes = 1024},
                         {.most_parts = 4, .oversized_every = 4});
    }
  }
}

TEST_CASE("fewer slots than 2(bound + 1) are safe and only wait") {
  for (const int world_size : {2, 3, 5}) {
    for (const uint32_t bound : {0u, 1u, 2u, 4u}) {
      for (uint32_t slots = bound + 1; slots < 2 * (bound + 1); ++slots) {
        exchange_at_random({.world_size = world_size, .bound = bound, .slots = slots},
                           {.most_parts = 4, .oversized_every = 9, .oversized_part = 10000});
      }
    }
  }
}

TEST_CASE("two ranks post messages larger than a slot to each other before either reads") {
  const Setup setup{.bound = 1, .slot_bytes = kMinSlotBytes};
  Ranks ranks(setup);
  for (int round = 0; round < 2; ++round) {
    Outgoing outgoing = to_all(2, std::string(100000, static_cast<char>('a' + round)));
    ranks[0].post(outgoing.messages());
    ranks[1].post(outgoing.messages());
  }
  for (int round = 0; round < 2; ++round) {
    for (int rank = 0; rank < 2; ++rank) {
      const Arrival& arrival = ranks[rank].wait();
      CHECK(text_of(arrival.part(1 - rank, 0)) ==
            std::string(100000, static_cast<char>('a' + round)));
      ranks[rank].release();
    }
  }
  CHECK(ranks[0].stats().pulled_messages == 2);
}

TEST_CASE("a slot takes messages that grow beyond it and shrink again") {
  Ranks ranks({.slot_bytes = 1024});
  Random random(1);
  uint64_t pulled = 0;
  for (const size_t size : {10, 5000, 200000, 9000, 900, 0, 1025, 400000, 100, 400000}) {
    const Bytes bytes = stamped(size, size);
    Outgoing outgoing(2);
    outgoing.add(0, bytes);
    outgoing.add_cut(1, bytes, random);
    for (int rank = 0; rank < 2; ++rank) ranks[rank].post(outgoing.messages());
    for (int rank = 0; rank < 2; ++rank) {
      const View& part = ranks[rank].wait().part(1 - rank, 0);
      CHECK(text_of(part) == text_of({bytes.data(), bytes.size()}));
      ranks[rank].release();
    }
    if (size > 1024) ++pulled;
    CHECK(ranks[0].stats().pulled_messages == pulled);
  }
}

TEST_CASE("a message that just fits the slot is not pulled") {
  for (const size_t over : {0, 1}) {
    Ranks ranks({.slot_bytes = 1024});
    const size_t room = ranks[0].transport().slot_bytes() - 64;  // the part starts at a cache line
    Outgoing outgoing = to_all(2, std::string(room + over, 'x'));
    for (int rank = 0; rank < 2; ++rank) ranks[rank].post(outgoing.messages());
    CHECK(ranks[0].stats().pulled_messages == over);
    CHECK(ranks[0].stats().largest_message == 64 + room + over);
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(ranks[rank].wait().part(1 - rank, 0).bytes == room + over);
      ranks[rank].release();
    }
  }
}

TEST_CASE("a rank's own parts stay in place where they are one block each") {
  Ranks ranks({.world_size = 1});
  Outgoing outgoing(1);
  outgoing.add(0, bytes_of("first"));
  outgoing.add(0, {});
  const std::byte* const address = outgoing.messages()[0][0][0].data;
  ranks[0].post(outgoing.messages());
  const Arrival& arrival = ranks[0].wait();
  CHECK(arrival.parts(0).size() == 2);
  CHECK(arrival.part(0, 0).data == address);
  CHECK(arrival.part(0, 1).bytes == 0);
}

TEST_CASE("a rank's own parts are copied when one of them has several blocks") {
  Ranks ranks({.world_size = 1});
  const Bytes matrix = bytes_of("ab..cd..ef..");
  const Block columns{matrix.data(), 2, 3, 4};
  const Block whole{matrix.data(), 4};
  const Part parts[] = {{&columns, 1}, {&whole, 1}, {}};
  const Message message(parts);
  ranks[0].post({&message, 1});
  const Arrival& arrival = ranks[0].wait();
  CHECK(text_of(arrival.part(0, 0)) == "abcdef");
  CHECK(text_of(arrival.part(0, 1)) == "ab..");
  CHECK(arrival.part(0, 1).data != matrix.data());
  CHECK(arrival.part(0, 2).bytes == 0);
}

TEST_CASE("a part is its blocks one after the other") {
  Ranks ranks({});
  const Bytes matrix = bytes_of("ab..cd..ef..");
  const Block blocks[] = {
      {matrix.data(), 2, 3, 4}, {}, {matrix.data() + 2, 1, 2, 1}, {nullptr, 0, 9, 3}};
  const Part parts[] = {blocks};
  const Message messages[] = {Message(parts), Message(parts)};
  for (int rank = 0; rank < 2; ++rank) ranks[rank].post(messages);
  CHECK(text_of(ranks[1].wait().part(0, 0)) == "abcdef..");
}

TEST_CASE("parts may be made in the slot, of sizes that only their writer knows") {
  Ranks ranks({.slot_bytes = 1024});
  uint64_t pulled = 0;
  // Parts from 64 bytes on start elsewhere; from about 450 on, two of them do not fit the slot.
  for (const size_t bytes : {0, 1, 15, 57, 63, 64, 65, 300, 440, 900, 20000, 2000, 16, 500}) {
    for (const size_t least : {size_t{0}, bytes / 2, bytes}) {
      CAPTURE(bytes);
      CAPTURE(least);
      const MadeMessage made(bytes, least);
      const Message messages[] = {made.parts, made.parts};
      for (int rank = 0; rank < 2; ++rank) ranks[rank].post(messages);
      for (int rank = 0; rank < 2; ++rank) {
        const Arrival& arrival = ranks[rank].wait();
        for (int source = 0; source < 2; ++source) made.check(arrival, source);
        ranks[rank].release();
      }
      if (bytes >= 500) ++pulled;
      CHECK(ranks[0].stats().pulled_messages == pulled);
    }
  }
}

TEST_CASE("a part that is made counts with the bytes that it has") {
  for (const size_t over : {0, 1}) {
    Ranks ranks({.slot_bytes = 1024});
    const size_t room = ranks[0].transport().slot_bytes() - 64;  // the part starts at a cache line
    const Made made(Bytes(room + over));
    const Block block{nullptr, 0, 1, 0, &made};
    const Part part(&block, 1);
    const Message messages[] = {{}, {&part, 1}};
    const Message nothing[2];
    ranks[0].post(messages);
    ranks[1].post(nothing);
    CHECK(ranks[0].stats().bytes == room + over);
    CHECK(ranks[0].stats().largest_message == 64 + room + over);
    CHECK(ranks[0].stats().pulled_messages == over);
    CHECK(ranks[1].wait().part(0, 0).bytes == room + over);
    ranks[1].release();
  }
}

TEST_CASE("all ranks learn of a part that could not be made, also of one to its own rank") {
  for (const size_t broken_for : {size_t{0}, size_t{1}, size_t{2}}) {
    CAPTURE(broken_for);
    Ranks ranks({.world_size = 3});
    const auto failures = ranks.outcomes([&](int rank, Channel& channel) {
      const Broken broken;
      const Block block{nullptr, 0, 1, 0, &broken};
      const Part part(&block, 1);
      Message messages[3];
      if (rank == 0) messages[broken_for] = {&part, 1};
      for (int i = 0; i < 2; ++i) {  // who had its message before may only see it the next time
        channel.post(messages);
        channel.wait();
        channel.release();
      }
    });
    REQUIRE(failures[0]);
    CHECK(failures[0]->message == "no such row");
    for (const size_t rank : {size_t{1}, size_t{2}}) {
      REQUIRE(failures[rank]);
      CHECK(failures[rank]->kind == ErrorKind::kPoisoned);
      CHECK_MESSAGE(failures[rank]->message.find("rank 0 failed: ") != std::string::npos,
                    failures[rank]->message);
      CHECK_MESSAGE(failures[rank]->message.find("no such row") != std::string::npos,
                    failures[rank]->message);
    }
  }
}

TEST_CASE("up to bound + 1 posts run ahead of a peer that has not begun") {
  for (const uint32_t bound : {0u, 1u, 4u}) {
    Ranks ranks({.bound = bound});
    for (uint32_t i = 0; i <= bound; ++i) {
      Outgoing outgoing = to_all(2, std::to_string(i));
      CHECK(ranks[0].post(outgoing.messages()) == i);
    }
    for (uint32_t i = 0; i <= bound; ++i) {
      Outgoing outgoing = to_all(2, "");
      ranks[1].post(outgoing.messages());
      CHECK(text_of(ranks[1].wait().part(0, 0)) == std::to_string(i));
      ranks[1].release();
    }
  }
}

TEST_CASE("several arrivals can be read before the oldest is released") {
  Ranks ranks({.bound = 2});
  for (const char* text : {"a", "b", "c"}) {
    Outgoing outgoing = to_all(2, text);
    ranks[0].post(outgoing.messages());
    ranks[1].post(outgoing.messages());
  }
  const Arrival* arrivals[] = {&ranks[1].wait(), &ranks[1].wait(), &ranks[1].wait()};
  CHECK(text_of(arrivals[0]->part(0, 0)) == "a");
  CHECK(text_of(arrivals[1]->part(0, 0)) == "b");
  CHECK(text_of(arrivals[2]->part(0, 0)) == "c");
  CHECK(arrivals[2]->sequence() == 2);
}

TEST_CASE("a channel is ready when every message of its oldest post is there") {
  Ranks ranks({.world_size = 3, .bound = 1});
  Outgoing outgoing = to_all(3, "text");
  for (int i = 0; i < 2; ++i) ranks[0].post(outgoing.messages());
  CHECK_FALSE(ranks[0].ready());
  ranks[1].post(outgoing.messages());
  CHECK_FALSE(ranks[0].ready());
  ranks[2].post(outgoing.messages());
  const Clock::time_point end = Clock::now() + std::chrono::seconds(10);
  while (!ranks[0].ready() && Clock::now() < end) std::this_thread::yield();
  CHECK(ranks[0].ready());
  ranks[0].wait();
  CHECK_FALSE(ranks[0].ready());  // the second post
}

TEST_CASE("messages of one sequence number belong to one call on all ranks") {
  Ranks ranks({.slot_bytes = 512});
  for (const uint32_t label : {0u, 7u, 0xFFFFFFFFu}) {
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank].label(label ^ (rank == 0 ? 0 : kCall + 1));  // autograd is off on one
      ranks[rank].post(to_all(2, "rows").messages());
    }
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
  // Rank 1 has left out a call; what it sends for the next one looks alike.
  ranks[0].label(0x0208);
  ranks[0].post(to_all(2, "rows").messages());
  ranks[1].label(0x0300);
  ranks[1].post(to_all(2, "rows").messages());
  const auto failure = failure_of([&] { ranks[0].wait(); });
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK_MESSAGE(failure->message.find("rank 1 sent what belongs to forward 3, call 0, but this "
                                      "rank waits for forward 2, call 8: one of the two left "
                                      "out an exchange") != std::string::npos,
                failure->message);
}

TEST_CASE("statistics count what was sent to other ranks") {
  // Nobody reads the large message, so that closing waits until the deadline.
  Ranks ranks({.world_size = 3, .slot_bytes = 1024, .deadline = std::chrono::milliseconds(1)});
  Outgoing outgoing(3);
  outgoing.add(0, Bytes(7));  // its own
  outgoing.add(1, Bytes(10));
  outgoing.add(1, Bytes(20));
  outgoing.add(2, Bytes(5000));
  ranks[0].post(outgoing.messages());
  const ChannelStats stats = ranks[0].stats();
  CHECK(stats.messages == 2);
  CHECK(stats.bytes == 5030);
  CHECK(stats.pulled_messages == 1);
  CHECK(stats.largest_message == 5064);
  CHECK(stats.wait_seconds == std::vector<double>{0, 0, 0});
  // A rank that has two ways to its peers has slots for itself in both.
  const std::string transport = transport_under_test();
  const size_t places = transport == "mixed" || transport == "tcp_between_hosts" ? 4 : 3;
  CHECK(ranks[0].transport().ring_bytes() == places * 2 * ranks[0].transport().slot_bytes());
}

TEST_CASE("waiting for a peer is counted as time waited for that peer") {
  Ranks ranks({.world_size = 3});
  ranks.run([](int rank, Channel& channel) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    Outgoing outgoing = to_all(3, "");
    channel.post(outgoing.messages());
    channel.wait();
  });
  const auto waited = ranks[2].stats().wait_seconds;
  CHECK(waited[1] > 0.02);
  CHECK(waited[2] == 0);
}

TEST_CASE("the histogram counts by how many iterations a rank is ahead of a peer") {
  Ranks ranks({.bound = 2});
  Outgoing outgoing = to_all(2, "");
  for (int i = 0; i < 3; ++i) ranks[0].post(outgoing.messages());
  ranks[1].post(outgoing.messages());
  ranks.arrived(0, 1, 0);
  ranks[0].wait();  // posted 3, the peer 1: one iteration between the two last
  CHECK(ranks[0].stats().lag_histogram == std::vector<uint64_t>{0, 1, 0});
  ranks[1].post(outgoing.messages());
  ranks.arrived(0, 1, 1);
  ranks[0].wait();  // posted 3, the peer 2
  ranks[1].post(outgoing.messages());
  ranks.arrived(0, 1, 2);
  ranks[0].wait();  // both 3
  CHECK(ranks[0].stats().lag_histogram == std::vector<uint64_t>{2, 1, 0});
  ranks[1].wait();  // the peer's lead does not count
  CHECK(ranks[1].stats().lag_histogram == std::vector<uint64_t>{1, 0, 0});
}

TEST_CASE("the lag reaches the bound and no more") {
  Ranks ranks({.bound = 2, .deadline = std::chrono::milliseconds(50)});
  Outgoing outgoing = to_all(2, "");
  for (int i = 0; i < 3; ++i) ranks[0].post(outgoing.messages());
  CHECK_THROWS_AS(ranks[0].wait(), ChannelError);
  CHECK(ranks[0].stats().lag_histogram == std::vector<uint64_t>{0, 0, 1});
}
