#include <doctest/doctest.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "channel/protocol.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr Expectation kExpected{.source = 3, .slot_bytes = 512};

/// A slot with a valid message of parts of 10 and 100 bytes.
class Slot {
 public:
  explicit Slot(uint8_t flags = 0) : bytes_(kExpected.slot_bytes) {
    header = {8, kMagic, kWireVersion, flags, 3, 2, 5, 0};
  }

  std::optional<Failure> parse(ParsedMessage& message) {
    std::memcpy(bytes_.data(), &header, sizeof(header));
    std::memcpy(bytes_.data() + sizeof(header), lengths.data(), sizeof(lengths));
    std::memcpy(bytes_.data() + header_bytes(header.parts), &address, sizeof(address));
    return failure_of([&] { parse_message(bytes_.data(), kExpected, message); });
  }

  MessageHeader header;
  std::array<uint64_t, 2> lengths{10, 100};
  MemoryAddress address{{1, 2, 3}, 4096};

 private:
  std::vector<std::byte> bytes_;
};

void check_damaged(Slot& slot, const std::string& what) {
  ParsedMessage message;
  const auto failure = slot.parse(message);
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK_MESSAGE(failure->message == "damaged header: " + what, failure->message);
}

}  // namespace

TEST_CASE("parts of a cache line or more start at cache lines, smaller ones at 16 bytes") {
  PartLayout layout;
  layout.count = 5;
  layout.bytes[0] = 1;
  layout.bytes[1] = 63;
  layout.bytes[2] = 64;
  layout.bytes[3] = 0;
  layout.bytes[4] = 65;
  layout.place(40);
  CHECK(layout.offset[0] == 48);
  CHECK(layout.offset[1] == 64);
  CHECK(layout.offset[2] == 128);
  CHECK(layout.offset[3] == 192);
  CHECK(layout.offset[4] == 192);
  CHECK(layout.end == 257);
}

TEST_CASE("a message without parts ends where it starts") {
  PartLayout layout;
  layout.count = 0;
  layout.place(24);
  CHECK(layout.end == 24);
}

TEST_CASE("sizes that overflow are refused") {
  PartLayout layout;
  layout.count = 2;
  layout.bytes[0] = uint64_t{1} << 63;
  layout.bytes[1] = uint64_t{1} << 63;
  CHECK_THROWS_AS(layout.place(0), std::length_error);
  layout.count = kMaxParts;
  layout.bytes.fill(uint64_t{1} << 46);
  CHECK_THROWS_AS(layout.place(0), std::length_error);
}

TEST_CASE("a message in a slot is read as it was laid out") {
  Slot slot;
  ParsedMessage message;
  REQUIRE_FALSE(slot.parse(message));
  CHECK(message.layout.count == 2);
  CHECK(message.layout.bytes[0] == 10);
  CHECK(message.layout.bytes[1] == 100);
  CHECK(message.layout.offset[0] == 48);
  CHECK(message.layout.offset[1] == 64);
  CHECK(message.credit == 5);
  CHECK_FALSE(message.pulled);
}

TEST_CASE("a pulled message carries the address of its parts") {
  Slot slot(kFlagPulled);
  slot.lengths = {1000, 3000};
  ParsedMessage message;
  REQUIRE_FALSE(slot.parse(message));
  CHECK(message.pulled);
  CHECK(message.layout.offset[0] == 0);
  CHECK(message.layout.offset[1] == 1024);
  CHECK(message.address.where[2] == 3);
  CHECK(message.address.bytes == 4096);
}

TEST_CASE("a damaged header is refused with the field that is wrong") {
  Slot slot;
  SUBCASE("magic") {
    slot.header.magic = 1;
    check_damaged(slot, "magic 1");
  }
  SUBCASE("version") {
    slot.header.version = kWireVersion + 1;
    check_damaged(slot, "wire version " + std::to_string(kWireVersion + 1) + ", this rank speaks " +
                            std::to_string(kWireVersion) + ": install one version on all ranks");
  }
  SUBCASE("source") {
    slot.header.source = 2;
    check_damaged(slot, "it says it comes from rank 2 of the group");
  }
  SUBCASE("flags") {
    slot.header.flags = 2;
    check_damaged(slot, "unknown flags");
  }
  SUBCASE("parts") {
    slot.header.parts = kMaxParts + 1;
    check_damaged(slot, "17 parts, at most 16 exist");
  }
  SUBCASE("a length beyond the slot") {
    slot.lengths[1] = 512 - 64 + 1;
    check_damaged(slot, "513 bytes in a slot of 512");
  }
  SUBCASE("a length beyond all memory") {
    slot.lengths[0] = ~uint64_t{0};
    check_damaged(slot, "part 0 has 18446744073709551615 bytes");
  }
  SUBCASE("pulled memory too short for the parts") {
    slot.header.flags = kFlagPulled;
    slot.lengths = {1000, 3073};
    check_damaged(slot, "4097 bytes in a pulled message's memory of 4096");
  }
}

TEST_CASE("a message has the bytes that docs/wire-format.md shows") {
  Ranks ranks({.world_size = 2}, heap_transports({.world_size = 2}));
  Outgoing outgoing(2);
  outgoing.add(0, bytes_of("abc"));
  outgoing.add(0, {});
  outgoing.add(0, Bytes(64, std::byte{0x55}));
  ranks[1].post(outgoing.messages());
  const std::byte* const slot = ranks.transport(0).inbox(1, 0);
  const auto shows = [&](size_t offset, const std::vector<int>& bytes) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      CAPTURE(offset + i);
      CHECK(std::to_integer<int>(slot[offset + i]) == bytes[i]);
    }
  };
  shows(0x00, {1, 0, 0, 0, 0, 0, 0, 0, 0x5a, 0xb1, 3, 0, 1, 0, 3, 0});
  shows(0x10, {0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0});
  shows(0x20, {0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0});
  shows(0x30, {'a', 'b', 'c'});
  shows(0x40, std::vector<int>(64, 0x55));
  ranks[0].post(outgoing.messages());
  const View& empty = ranks[0].wait().part(1, 1);
  CHECK(empty.bytes == 0);
  CHECK(empty.data - slot == 0x40);
  CHECK(ranks[1].stats().largest_message == 128);
}
