#include "host/limits.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace bls {
namespace {

namespace fs = std::filesystem;

/// The first numbers of a file; empty where it is not there or begins with a word, as "max".
std::vector<int64_t> read_numbers(const fs::path& path) {
  std::ifstream file(path);
  std::vector<int64_t> numbers;
  for (int64_t number; file >> number;) numbers.push_back(number);
  return numbers;
}

std::optional<uint64_t> read_bytes(const fs::path& path) {
  const std::vector<int64_t> numbers = read_numbers(path);
  if (numbers.empty() || numbers[0] < 0) return std::nullopt;
  return static_cast<uint64_t>(numbers[0]);
}

/// Adds up the numbers behind these words, each at the beginning of a line. Nothing where there is
/// no such line.
std::optional<uint64_t> sum_of_lines(const fs::path& path,
                                     std::initializer_list<std::string_view> words) {
  std::ifstream file(path);
  std::optional<uint64_t> sum;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string word;
    uint64_t number = 0;
    if (fields >> word >> number && std::ranges::find(words, word) != words.end()) {
      sum = sum.value_or(0) + number;
    }
  }
  return sum;
}

bool lists(const std::string& controllers, const std::string& controller) {
  return ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
}

/// The folders of this process's group and of all groups around it.
std::vector<fs::path> group_folders(const fs::path& root, const std::string& controller) {
  std::vector<fs::path> folders;
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // number:controllers:path, without controllers in version 2
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path group = fs::path(line.substr(second + 1)).relative_path();
    std::vector<fs::path> mounts{"", "unified"};  // the latter beside version 1
    if (!controllers.empty()) {
      if (!lists(controllers, controller)) continue;
      mounts = {controllers, controller};
    }
    for (const fs::path& mount : mounts) {
      const fs::path top = root / "sys/fs/cgroup" / mount;
      // A container may see the host's path and only its own group, at the mount's top.
      for (fs::path part = group;; part = part.parent_path()) {
        std::error_code error;
        if (fs::is_directory(top / part, error)) folders.push_back(top / part);
        if (part.empty()) break;
      }
    }
  }
  return folders;
}

/// Memory of a group that the kernel takes back before it ends a process: cached files.
uint64_t reclaimable(const fs::path& folder) {
  const fs::path stat = folder / "memory.stat";
  // Version 1 has both: those of the group alone, and with the groups within it.
  const auto total = sum_of_lines(stat, {"total_inactive_file", "total_active_file"});
  return total ? *total : sum_of_lines(stat, {"inactive_file", "active_file"}).value_or(0);
}

}  // namespace

double usable_cpus() {
  static const double quota = cpu_quota();
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  const bool known = sched_getaffinity(0, sizeof(cpus), &cpus) == 0;
  const auto count = known ? static_cast<double>(CPU_COUNT(&cpus))
                           : static_cast<double>(std::thread::hardware_concurrency());
  return std::min(std::max(count, 1.0), quota);
}

double cpu_quota(const fs::path& root) {
  double least = std::numeric_limits<double>::infinity();
  for (const fs::path& folder : group_folders(root, "cpu")) {
    std::vector<int64_t> numbers = read_numbers(folder / "cpu.max");  // quota and period
    if (numbers.empty()) {
      for (const char* name : {"cpu.cfs_quota_us", "cpu.cfs_period_us"}) {
        for (const int64_t number : read_numbers(folder / name)) numbers.push_back(number);
      }
    }
    if (numbers.size() != 2 || numbers[0] <= 0 || numbers[1] <= 0) continue;  // -1: no limit
    least = std::min(least, static_cast<double>(numbers[0]) / static_cast<double>(numbers[1]));
  }
  return least;
}

uint64_t memory_left(uint64_t wanted, const fs::path& root) {
  const fs::path meminfo = root / "proc/meminfo";
  uint64_t left = std::numeric_limits<uint64_t>::max();
  const uint64_t swap = sum_of_lines(meminfo, {"SwapFree:"}).value_or(0) * 1024;
  if (const auto available = sum_of_lines(meminfo, {"MemAvailable:"})) {
    left = *available * 1024 + swap;
  }
  for (const fs::path& folder : group_folders(root, "memory")) {
    auto limit = read_bytes(folder / "memory.max");
    auto usage = read_bytes(folder / "memory.current");
    if (!limit) limit = read_bytes(folder / "memory.limit_in_bytes");
    if (!usage) usage = read_bytes(folder / "memory.usage_in_bytes");
    if (!limit || !usage) continue;
    uint64_t of_group = *limit - std::min(*limit, *usage);
    if (of_group < wanted) {  // only then, as these take the kernel long
      of_group += reclaimable(folder) + swap;
    }
    left = std::min(left, of_group);
  }
  return left;
}

}  // namespace bls
