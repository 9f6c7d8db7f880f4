#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/checks.h"
#include "transport/shm/shm_segment.h"
#include "transport/shm/shm_transport.h"

using namespace bls;
using namespace bls::testing;

namespace {

// Of the thread that tests it; all reserve.
thread_local int interruptions = 0;  // that are still to come
thread_local off_t largest_reservation = 0;

}  // namespace

/// In place of the C library's: a signal may come, which older kernels give in to.
extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  largest_reservation = std::max(largest_reservation, bytes);
  if (interruptions > 0) {
    --interruptions;
    return EINTR;
  }
  return fallocate(fd, 0, offset, bytes) == 0 ? 0 : errno;
}

TEST_CASE("a segment is zeroed, private to its user and has no name") {
  const ShmSegment segment = ShmSegment::create(10000, "a test");
  CHECK(segment.size() == 10000);
  CHECK(std::all_of(segment.data(), segment.data() + segment.size(),
                    [](std::byte b) { return b == std::byte{0}; }));
  struct stat info {};
  REQUIRE(fstat(segment.address().fd, &info) == 0);
  CHECK((info.st_mode & 07777) == 0600);
  CHECK(info.st_nlink == 0);
  CHECK(info.st_blocks * 512 >= 10000);  // reserved, not only promised
}

TEST_CASE("signals do not keep a segment from being reserved, and little is lost by one") {
  interruptions = 5;
  largest_reservation = 0;
  const auto failure = failure_of([] {
    const ShmSegment segment = ShmSegment::create(10 << 20, "a test");
    struct stat info {};
    REQUIRE(fstat(segment.address().fd, &info) == 0);
    CHECK(info.st_blocks * 512 >= 10 << 20);
  });
  CHECK_MESSAGE(!failure, failure->message);
  CHECK(interruptions == 0);
  CHECK(largest_reservation <= 1 << 20);
}

TEST_CASE("nobody can cut off a segment that others have mapped") {
  const ShmSegment segment = ShmSegment::create(10000, "a test");
  const int fd = segment.address().fd;
  CHECK(ftruncate(fd, 0) != 0);
  CHECK(errno == EPERM);
  CHECK(ftruncate(fd, 20000) != 0);
  CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) != 0);
}

TEST_CASE("a segment that is opened is the same memory") {
  const ShmSegment segment = ShmSegment::create(4096, "a test");
  const ShmSegment opened = ShmSegment::open(segment.address());
  CHECK(opened.data() != segment.data());
  segment.data()[5] = std::byte{42};
  CHECK(opened.data()[5] == std::byte{42});
}

TEST_CASE("a mapping outlives the segment that it was opened from and its descriptor") {
  std::optional<ShmSegment> segment = ShmSegment::create(4096, "a test");
  const ShmSegment opened = ShmSegment::open(segment->address());
  segment->close_descriptor();
  segment->data()[0] = std::byte{42};
  segment.reset();
  CHECK(opened.data()[0] == std::byte{42});
}

TEST_CASE("a descriptor number that means another file by now is refused") {
  std::optional<ShmSegment> segment = ShmSegment::create(4096, "a test");
  const SegmentAddress address = segment->address();
  segment.reset();
  check_failure(failure_of([&] { ShmSegment::open(address); }), ErrorKind::kRendezvous,
                "cannot open shared memory of process " + std::to_string(getpid()));
  const ShmSegment other = ShmSegment::create(4096, "another test");
  REQUIRE(other.address().fd == address.fd);
  check_failure(failure_of([&] { ShmSegment::open(address); }), ErrorKind::kProtocol,
                "is not there any more: it restarted or closed");
}

TEST_CASE("nothing is opened but the memory of a segment") {
  const auto refuses = [](int fd) {
    struct stat info {};
    REQUIRE(fstat(fd, &info) == 0);
    const SegmentAddress address{getpid(), fd, info.st_dev, info.st_ino,
                                 static_cast<uint64_t>(info.st_size)};
    check_failure(failure_of([&] { ShmSegment::open(address); }), ErrorKind::kProtocol,
                  "is not there any more");
    close(fd);
  };
  SUBCASE("a memory file of another size tomorrow") {
    const int fd = memfd_create("not sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(ftruncate(fd, 4096) == 0);
    refuses(fd);
  }
  SUBCASE("a memory file that may shrink") {
    const int fd = memfd_create("half sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(ftruncate(fd, 4096) == 0);
    REQUIRE(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SEAL) == 0);
    refuses(fd);
  }
  // What has a name can be watched, by the test and by whoever waits at the end of a pipe.
  char folder[] = "/tmp/torchrec-bls-test-XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  const std::string path = std::string(folder) + "/named";
  SUBCASE("a file with a name") { REQUIRE(mknod(path.c_str(), S_IFREG | 0600, 0) == 0); }
  SUBCASE("a pipe") { REQUIRE(mkfifo(path.c_str(), 0600) == 0); }
  const int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  if (access(path.c_str(), F_OK) == 0) {
    REQUIRE(inotify_add_watch(watch, path.c_str(), IN_OPEN) >= 0);
    refuses(open(path.c_str(), O_PATH | O_CLOEXEC));
    inotify_event event;
    CHECK(read(watch, &event, sizeof(event)) < 0);
    CHECK(errno == EAGAIN);
  }
  close(watch);
  unlink(path.c_str());
  rmdir(folder);
}

TEST_CASE("more memory than there is gives an error that says how much and what to do") {
  const auto failure = failure_of([] { ShmSegment::create(size_t{1} << 44, "a test"); });
  check_failure(failure, ErrorKind::kRendezvous, "no memory for a test: 16777216 MiB needed, ");
  check_failure(failure, ErrorKind::kRendezvous, "Lower the bound, slot_bytes or the batch");
}

TEST_CASE("the memory of a large message is kept while small ones take turns with it") {
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);)
      count += line.find(" /memfd:torchrec_bls") != line.npos;
    return count;
  };
  Ranks ranks({.slot_bytes = 1024});
  const auto exchange = [&](size_t bytes) {
    Outgoing outgoing = to_all(2, std::string(bytes, 'x'));
    for (int rank = 0; rank < 2; ++rank) ranks[rank].post(outgoing.messages());
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(ranks[rank].wait().part(1 - rank, 0).bytes == bytes);
      ranks[rank].release();
    }
  };
  const int before = mappings();
  exchange(5000);
  const int with_one = mappings();
  CHECK(with_one == before + 4);  // two messages, mapped by sender and receiver
  exchange(10);
  // The other of two slots is empty in the meantime.
  for (int i = 0; i < 99; ++i) {
    exchange(10);
    exchange(10);
  }
  CHECK(mappings() == with_one);
  exchange(10);
  CHECK(mappings() == before);
}

TEST_CASE("a ring that is too large names its shape") {
  check_failure(failure_of([] {
                  ShmTransport({.rank = 3, .world_size = 8, .slots = 4, .slot_bytes = 1ul << 40});
                }),
                ErrorKind::kRendezvous, "for 8 x 4 slots of 1099511627904 bytes on rank 3");
}

TEST_CASE("slots whose bytes cannot be counted are refused") {
  const auto refusal = [](int world_size, uint32_t slots, size_t slot_bytes) {
    const auto failure = failure_of([&] {
      ShmTransport({.rank = 0, .world_size = world_size, .slots = slots, .slot_bytes = slot_bytes});
    });
    REQUIRE(failure);
    CHECK(!failure->kind);  // a caller's mistake
    return failure->message;
  };
  for (const size_t bytes : {(size_t{1} << 40) + 1, size_t{1} << 62, ~size_t{0}, ~size_t{0} - 63}) {
    CHECK(refusal(2, 2, bytes) == "slot_bytes is " + std::to_string(bytes) +
                                      ", but at most 1099511627776 are possible: use the usual "
                                      "message size");
  }
  CHECK(refusal(65535, 131074, size_t{1} << 40).find("65535 x 131074 slots of") == 0);
  CHECK(refusal(1 << 23, 1, size_t{1} << 24).find("lower slot_bytes, the bound or") !=
        std::string::npos);
}

TEST_CASE("slots start at cache lines and are no multiple of a page apart") {
  for (const size_t wanted : {256u, 257u, 4096u, 1u << 20}) {
    ShmTransport transport({.rank = 0, .world_size = 2, .slots = 2, .slot_bytes = wanted});
    CHECK(transport.slot_bytes() >= wanted);
    CHECK(transport.slot_bytes() < wanted + 192);
    CHECK(transport.slot_bytes() % 64 == 0);
    CHECK(transport.slot_bytes() % 4096 != 0);
    CHECK(transport.ring_bytes() == 4 * transport.slot_bytes());
    const std::byte* const first = transport.inbox(0, 0);
    CHECK(reinterpret_cast<uintptr_t>(first) % 64 == 0);
    CHECK(transport.inbox(1, 1) - first == 3 * static_cast<ptrdiff_t>(transport.slot_bytes()));
  }
}

TEST_CASE("an inbox of another size is refused") {
  ShmTransport small({.rank = 0, .world_size = 2, .slots = 2, .slot_bytes = 4096});
  ShmTransport large({.rank = 1, .world_size = 2, .slots = 2, .slot_bytes = 65536});
  const SegmentAddress addresses[] = {small.address(), large.address()};
  check_failure(failure_of([&] { small.connect(addresses); }), ErrorKind::kProtocol,
                "rank 1 announced a segment of");
}

TEST_CASE("a forked child that gives up a transport has none of its descriptors") {
  const Setup setup{.slot_bytes = 1024};
  auto ranks = shm_mesh(setup);
  MemoryAddress address;
  ranks[0]->expose(1, 0, 5000, address);
  const auto descriptors = [] {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
      const bool own =
          target.find("torchrec_bls") != target.npos || target.find("pidfd") != target.npos;
      if (own) found.push_back(target);
    }
    return found;
  };
  REQUIRE(descriptors().size() == 3);  // what is exposed, and each rank's handle of the other
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    for (auto& rank : ranks) rank->abandon();
    _exit(static_cast<int>(descriptors().size()));
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(descriptors().size() == 3);
}

TEST_CASE("a process that was killed is dead, one that runs is not") {
  const RingShape shape{.rank = 0, .world_size = 2, .slots = 2, .slot_bytes = 256};
  ShmTransport own(shape);
  ShmTransport other({.rank = 1, .world_size = 2, .slots = 2, .slot_bytes = 256});
  const pid_t child = fork();  // has a copy of the descriptor of rank 1's segment
  REQUIRE(child >= 0);
  if (child == 0) {
    for (;;) pause();
  }
  SegmentAddress addresses[] = {own.address(), other.address()};
  addresses[1].pid = child;
  own.connect(addresses);
  CHECK(own.peer_state(1) == PeerState::kOpen);
  kill(child, SIGKILL);
  const auto end = Clock::now() + std::chrono::seconds(20);
  while (own.peer_state(1) == PeerState::kOpen && Clock::now() < end) std::this_thread::yield();
  CHECK(own.peer_state(1) == PeerState::kDead);
  waitpid(child, nullptr, 0);
}
