// Devices and connections that cannot be used, and which of several are: with the cure in each
// text.

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "tests/verbs/fake_ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

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

}  // namespace

TEST_SUITE_BEGIN("verbs");

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
    text = "at most 20 requests (max_qp_wr), and 30 are needed: lower the bound";
  }
  SUBCASE("too many connections") {
    device.create_error = ENOMEM;
    text = "fake0 port 1: cannot create a queue pair for 12 requests, which a lower bound makes";
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
  const auto descriptors = [] {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
      if (target.find("[eventfd]") != target.npos) ++count;
    }
    return count;
  };
  const int before = descriptors();  // of other tests
  const auto library = std::make_shared<FakeIbverbs>();
  auto ranks = connected(library, Setup{});
  // Each rank's device (two), its events and its wake-up.
  REQUIRE(descriptors() == before + 8);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    for (auto& rank : ranks) rank->abandon();
    _exit(descriptors());
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == before);
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

TEST_SUITE_END();
