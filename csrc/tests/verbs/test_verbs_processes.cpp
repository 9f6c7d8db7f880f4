// Ranks as processes over the device under test, as they run in production: what threads share by
// accident is not shared here.

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "tests/support/random_exchange.h"
#include "tests/support/transport_under_test.h"
#include "tests/verbs/verbs_ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr int kMostRanks = 8;

/// What the processes share to find each other.
class Meeting {
 public:
  Meeting() {
    void* const memory =
        mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for a meeting");
    board_ = new (memory) Board{};
  }
  ~Meeting() { munmap(board_, sizeof(Board)); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  std::vector<VerbsAddress> exchange(int rank, int world_size, const VerbsAddress& own) {
    Place& place = board_->places[rank];
    place.address = own;
    std::copy(own.queue_pairs.begin(), own.queue_pairs.end(), place.queue_pairs);
    std::copy(own.places.begin(), own.places.end(), place.places);
    await_all(world_size);
    std::vector<VerbsAddress> addresses;
    for (int peer = 0; peer < world_size; ++peer) {
      const Place& other = board_->places[peer];
      VerbsAddress& address = addresses.emplace_back(other.address);
      address.queue_pairs.assign(other.queue_pairs, other.queue_pairs + world_size);
      address.places.assign(other.places, other.places + world_size);
    }
    return addresses;
  }

  /// Ends when all ranks have come as often as this one.
  void await_all(int world_size) {
    const int wanted = ++turns_ * world_size;
    ++board_->arrivals;
    const auto end = Clock::now() + std::chrono::seconds(60);
    while (board_->arrivals.load() < wanted) {
      if (Clock::now() > end) throw std::runtime_error("a rank did not come");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  struct PlainAddress {
    ibv_gid gid;
    uint16_t lid;
    uint32_t mtu;
    uint32_t packet_number;
    uint64_t memory;
    uint64_t memory_bytes;
    uint32_t remote_key;
    PlainAddress& operator=(const VerbsAddress& from) {
      gid = from.gid;
      lid = from.lid;
      mtu = from.mtu;
      packet_number = from.packet_number;
      memory = from.memory;
      memory_bytes = from.memory_bytes;
      remote_key = from.remote_key;
      return *this;
    }
    operator VerbsAddress() const {
      return {gid, lid, mtu, packet_number, memory, memory_bytes, remote_key, {}, {}};
    }
  };
  struct Place {
    PlainAddress address;
    uint32_t queue_pairs[kMostRanks];
    uint32_t places[kMostRanks];
  };
  struct Board {
    std::atomic<int> arrivals;
    Place places[kMostRanks];
  };

  Board* board_;
  int turns_ = 0;
};

using Body = std::function<void(int rank, Channel& channel, Meeting& meeting)>;

/// Runs `body` on all ranks, each a process, and returns how each ended: its exit status, or minus
/// the signal. A body that throws prints why and ends with 1.
std::vector<int> run_processes(const Setup& setup, const Body& body) {
  Meeting meeting;
  std::vector<pid_t> children;
  std::fflush(nullptr);
  for (int rank = 0; rank < setup.world_size; ++rank) {
    children.push_back(fork());
    REQUIRE(children.back() >= 0);
    if (children.back() != 0) continue;
    const auto failure = failure_of([&] {
      VerbsConfig config;
      config.device = device_of(rank);
      const RingShape shape{rank, setup.world_size, setup.slot_count(), setup.slot_bytes};
      auto transport = std::make_unique<VerbsTransport>(load_ibverbs(), config, shape,
                                                        setup.deadline, others(shape));
      transport->connect(meeting.exchange(rank, setup.world_size, transport->address()));
      meeting.await_all(setup.world_size);
      Channel channel(std::move(transport), {rank, setup.world_size, setup.bound,
                                             setup.slot_count(), setup.deadline, "tested"});
      body(rank, channel, meeting);
    });
    if (failure) std::fprintf(stderr, "rank %d: %s\n", rank, failure->message.c_str());
    std::fflush(nullptr);
    _exit(failure ? 1 : 0);
  }
  std::vector<int> ends;
  for (const pid_t child : children) {
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    ends.push_back(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
  }
  return ends;
}

std::vector<int> all(int world_size, int end) {
  return std::vector<int>(static_cast<size_t>(world_size), end);
}

}  // namespace

TEST_SUITE_BEGIN("processes");

TEST_CASE("messages among processes arrive byte for byte" *
          doctest::skip(device_under_test().empty())) {
  for (const int world_size : {2, 3, 4, 8}) {
    for (const uint32_t bound : {0u, 2u}) {
      CAPTURE(world_size);
      CAPTURE(bound);
      const Setup setup{.world_size = world_size, .bound = bound, .slot_bytes = 2048};
      const Sizes sizes{.most_parts = 6, .oversized_every = 12};
      CHECK(run_processes(setup, [&](int rank, Channel& channel, Meeting&) {
              random_exchange(rank, channel, sizes, 50);
              channel.close();
            }) == all(world_size, 0));
    }
  }
}

TEST_CASE("a process that is killed is an error on all others, by the deadline" *
          doctest::skip(device_under_test().empty())) {
  for (const int world_size : {2, 3, 4, 8}) {
    CAPTURE(world_size);
    const Setup setup{.world_size = world_size, .deadline = std::chrono::seconds(30)};
    auto expected = all(world_size, 0);
    expected[1] = -SIGKILL;
    CHECK(run_processes(setup, [&](int rank, Channel& channel, Meeting&) {
            Outgoing outgoing = to_all(world_size, "text");
            channel.post(outgoing.messages());
            channel.wait();
            channel.release();
            if (rank == 1) kill(getpid(), SIGKILL);
            const Clock::time_point start = Clock::now();
            const auto failure = failure_of([&] {
              channel.post(outgoing.messages());  // fails already where another rank was first
              channel.wait();
            });
            expect(failure.has_value(), "nobody noticed");
            expect(failure->kind == ErrorKind::kPeerDied || failure->kind == ErrorKind::kPoisoned,
                   failure->message);
            expect(failure->message.find("rank 1 is lost") != std::string::npos, failure->message);
            expect(Clock::now() - start < std::chrono::seconds(20), "noticed late");
          }) == expected);
  }
}

TEST_CASE("a process that closes early is named" * doctest::skip(device_under_test().empty())) {
  const Setup setup{.world_size = 3};
  CHECK(run_processes(setup, [&](int rank, Channel& channel, Meeting&) {
          Outgoing outgoing = to_all(3, "text");
          channel.post(outgoing.messages());
          channel.wait();
          channel.release();
          if (rank == 1) return channel.close();
          const auto failure = failure_of([&] {
            channel.post(outgoing.messages());  // fails already where another rank was first
            channel.wait();
          });
          expect(failure.has_value(), "nobody noticed");
          expect(failure->kind == ErrorKind::kPeerClosed || failure->kind == ErrorKind::kPoisoned,
                 failure->message);
          expect(failure->message.find("rank 1 closed the channel") != std::string::npos,
                 failure->message);
        }) == all(3, 0));
}

TEST_CASE("a link that goes down is an error on all ranks, and new channels work when it is up" *
          doctest::skip(link_under_test().empty())) {
  const auto set_link = [](const std::string& state) {
    const std::string command = "ip link set " + link_under_test() + " " + state;
    expect(std::system(command.c_str()) == 0, command + " failed");
  };
  for (const int world_size : {2, 4}) {
    CAPTURE(world_size);
    const Setup setup{.world_size = world_size, .deadline = std::chrono::seconds(30)};
    CHECK(run_processes(setup, [&](int rank, Channel& channel, Meeting& meeting) {
            Outgoing outgoing = to_all(world_size, "text");
            channel.post(outgoing.messages());
            channel.wait();
            channel.release();
            meeting.await_all(world_size);
            if (rank == 0) set_link("down");
            meeting.await_all(world_size);
            const Clock::time_point start = Clock::now();
            const auto failure = failure_of([&] {
              channel.post(outgoing.messages());
              channel.wait();
              channel.release();
              channel.post(outgoing.messages());
              channel.wait();
            });
            expect(failure.has_value(), "nobody noticed");
            expect(failure->kind == ErrorKind::kTransport || failure->kind == ErrorKind::kPoisoned,
                   failure->message);
            expect(failure->message.find("the port is down") != std::string::npos,
                   failure->message);
            expect(Clock::now() - start < std::chrono::seconds(20), "noticed late");
          }) == all(world_size, 0));
    set_link("up");
    CHECK(run_processes(setup, [&](int rank, Channel& channel, Meeting&) {
            random_exchange(rank, channel, {}, 10);
            channel.close();
          }) == all(world_size, 0));
  }
}

TEST_SUITE_END();
