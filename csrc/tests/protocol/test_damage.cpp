// Messages that are damaged, or cannot be had.

#include <doctest/doctest.h>

#include <cstring>
#include <exception>
#include <stdexcept>

#include "channel/protocol.h"
#include "tests/support/checks.h"
#include "tests/support/heap_transport.h"
#include "tests/support/transport_under_test.h"
#include "transport/shm/shm_segment.h"

using namespace bls;
using namespace bls::testing;

namespace {

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

}  // namespace

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
