#include <doctest/doctest.h>
#include <sched.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "host/limits.h"

using namespace bls;

namespace {

constexpr uint64_t kMebibyte = 1 << 20;

/// A root folder of files such as a host shows them.
class Host {
 public:
  Host() {
    char name[] = "/tmp/torchrec-bls-test-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    root_ = name;
  }
  ~Host() { std::filesystem::remove_all(root_); }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  const std::filesystem::path& root() const { return root_; }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = root_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
  }

 private:
  std::filesystem::path root_;
};

}  // namespace

TEST_CASE("the quota of version 2 is that of the narrowest group around the process") {
  const Host host;
  CHECK(std::isinf(cpu_quota(host.root())));
  host.write("proc/self/cgroup", "0::/pod/container");
  host.write("sys/fs/cgroup/pod/container/cpu.max", "max 100000");
  CHECK(std::isinf(cpu_quota(host.root())));
  host.write("sys/fs/cgroup/pod/cpu.max", "150000 100000");
  CHECK(cpu_quota(host.root()) == 1.5);
  host.write("sys/fs/cgroup/pod/container/cpu.max", "50000 100000");
  CHECK(cpu_quota(host.root()) == 0.5);
}

TEST_CASE("the quota of version 1 lies below its controllers") {
  const Host host;
  host.write("proc/self/cgroup", "5:memory:/elsewhere\n4:cpu,cpuacct:/docker/1a2b\n0::/");
  host.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1");
  host.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  CHECK(std::isinf(cpu_quota(host.root())));
  // As a container sees it, which has the host's path and its own group at the top.
  host.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000");
  CHECK(cpu_quota(host.root()) == 2);
}

TEST_CASE("what is left of memory is the least of the host's and of all groups'") {
  const Host host;
  CHECK(memory_left(1, host.root()) == UINT64_MAX);
  host.write("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 2048 kB\nSwapFree: 1024 kB");
  CHECK(memory_left(1, host.root()) == 3 * kMebibyte);
  host.write("proc/meminfo", "MemAvailable: 0 kB");
  CHECK(memory_left(1, host.root()) == 0);
  host.write("proc/meminfo", "MemAvailable: 2048 kB\nSwapFree: 1024 kB");
  host.write("proc/self/cgroup", "4:memory:/pod");
  const std::string group = "sys/fs/cgroup/memory/pod/memory.";
  host.write(group + "limit_in_bytes", "9223372036854771712");
  host.write(group + "usage_in_bytes", "4096");
  CHECK(memory_left(1, host.root()) == 3 * kMebibyte);
  host.write("proc/meminfo", "MemAvailable: 1000000 kB\nSwapFree: 0 kB");
  host.write(group + "limit_in_bytes", std::to_string(10 * kMebibyte));
  host.write(group + "usage_in_bytes", std::to_string(6 * kMebibyte));
  host.write(group + "stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(kMebibyte) +
                                 "\ntotal_active_file " + std::to_string(kMebibyte));
  CHECK(memory_left(4 * kMebibyte, host.root()) == 4 * kMebibyte);
  CHECK(memory_left(5 * kMebibyte, host.root()) == 6 * kMebibyte);  // with cached files
}

TEST_CASE("what is left in a group of version 2") {
  const Host host;
  host.write("proc/self/cgroup", "0::/pod");
  host.write("sys/fs/cgroup/pod/memory.max", "max");
  host.write("sys/fs/cgroup/pod/memory.current", "4096");
  CHECK(memory_left(1, host.root()) == UINT64_MAX);
  host.write("sys/fs/cgroup/pod/memory.max", "8192");
  CHECK(memory_left(1, host.root()) == 4096);
  host.write("sys/fs/cgroup/pod/memory.stat", "anon 4096\ninactive_file 1000\nactive_file 24");
  CHECK(memory_left(5000, host.root()) == 5120);
}

TEST_CASE("a process may use as many CPUs as its affinity names") {
  cpu_set_t before;
  REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0);
  const double cpus = usable_cpus();
  CHECK(cpus > 0);
  CHECK(cpus <= CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
  CHECK(usable_cpus() <= 1);
  REQUIRE(sched_setaffinity(0, sizeof(before), &before) == 0);
}
