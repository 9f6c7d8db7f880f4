#include <doctest/doctest.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "lookup/direct/segment_memory.h"
#include "lookup/direct/table_segment.h"
#include "lookup/direct/table_window.h"
#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

namespace {

const TableLabel kPagesLabel{0, "seven", {std::byte{1}}};
constexpr size_t kHugePages = 5;
constexpr size_t kTail = 12345;
constexpr size_t kBytes = kHugePages * kHugePage + kTail;

/// Random bytes, in the place that they have in a segment.
const std::vector<std::byte>& content() {
  static const std::vector<std::byte> all = [] {
    std::vector<std::byte> bytes(kBytes);
    std::mt19937_64 random(7);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
  }();
  return all;
}

/// A segment with them, in parts of which most lie in two pages of 2 MiB.
TableSegment segment_in(HugePages pages) {
  constexpr size_t kPart = kHugePage - 4096;
  size_t at = TableSegment::kFirstOffset;
  const NextPart next = [&]() -> std::optional<TablePart> {
    if (at == kBytes) return std::nullopt;
    const size_t bytes = std::min(kPart, kBytes - at);
    at += bytes;
    return TablePart{content().data() + at - bytes, bytes, at - bytes};
  };
  return TableSegment::create(kPagesLabel, next, kBytes, pages);
}

bool has_content(const std::byte* data) {
  constexpr size_t kFirst = TableSegment::kFirstOffset;
  return std::memcmp(data + kFirst, content().data() + kFirst, kBytes - kFirst) == 0;
}

/// Bytes of this process's mapping at `data` that the processor finds as pages of 2 MiB.
size_t mapped_as_huge(const std::byte* data) {
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<uintptr_t>(data) << '-';
  std::ifstream file("/proc/self/smaps");
  size_t kilobytes = 0;
  bool found = false;
  for (std::string line; std::getline(file, line);) {
    if (!found) {
      found = line.starts_with(begin.str());
      continue;
    }
    std::istringstream fields(line);
    std::string word;
    size_t number = 0;
    fields >> word >> number;
    if (word.find("PmdMapped") != std::string::npos || word.find("_Hugetlb") != std::string::npos) {
      kilobytes += number;
    }
    if (word == "VmFlags:") break;
  }
  return kilobytes * 1024;
}

size_t bytes_taken(const TableSegment& segment) {
  struct stat info {};
  REQUIRE(fstat(segment.descriptor(), &info) == 0);
  return static_cast<size_t>(info.st_blocks) * 512;
}

bool host_has_them() {
  if (emulator_lacks("pages of 2 MiB in /proc/self/smaps")) return false;
  const bool has = segment_in(HugePages::kTransparent).small_page_bytes() == 0;
  if (!has) MESSAGE("skipped: this host gives no transparent pages of 2 MiB to shared memory");
  return has;
}

/// A number of pages of 2 MiB as the host tells it.
size_t pages_of_host(const std::string& name) {
  size_t pages = 0;
  std::ifstream("/sys/kernel/mm/hugepages/hugepages-2048kB/" + name) >> pages;
  return pages;
}

bool pool_has_them() {
  if (emulator_lacks("pages of 2 MiB in /proc/self/smaps")) return false;
  const bool has = pages_of_host("free_hugepages") > 2 * kHugePages;
  if (!has) MESSAGE("skipped: this host's pool has too few pages of 2 MiB (vm.nr_hugepages)");
  return has;
}

/// Checks all ways to map a segment, of which `huge` bytes are in pages of 2 MiB.
void check_mappings(const TableSegment& segment, size_t huge) {
  CHECK(has_content(segment.data()));
  CHECK(mapped_as_huge(segment.data()) == huge);

  const TableSegment opened = TableSegment::open(segment.address(), kPagesLabel);
  CHECK(opened.size() == kBytes);
  CHECK(opened.small_page_bytes() == segment.small_page_bytes());
  CHECK(has_content(opened.data()));
  CHECK(mapped_as_huge(opened.data()) == huge);

  const std::vector<SegmentPages> all{{&segment, 0, whole_pages(segment.mapped_bytes())}};
  const TableWindow window(all);
  window.populate();
  CHECK(mapped_as_huge(window.data()) == huge);
  CHECK(has_content(window.data()));

  const PrivatePages pages(segment);
  CHECK(pages.size() == kBytes);
  CHECK(has_content(pages.data()));
}

/// Checks windows of a segment with pages of 2 MiB, which lie in another order there.
void check_window(const TableSegment& segment) {
  const std::vector<SegmentPages> pieces{{&segment, 3 * kHugePage, kHugePage},
                                         {&segment, kHugePage, 2 * kHugePage}};
  const TableWindow window(pieces);
  window.populate();
  CHECK(mapped_as_huge(window.data()) + mapped_as_huge(window.data() + kHugePage) == 3 * kHugePage);
  const auto same = [&](size_t at, size_t offset, size_t bytes) {
    return std::memcmp(window.data() + at, content().data() + offset, bytes) == 0;
  };
  CHECK(same(0, 3 * kHugePage, kHugePage));
  CHECK(same(kHugePage, kHugePage, 2 * kHugePage));
  const TableWindow shared(pieces, TableWindow::Pages::kShared);
  CHECK(shared.is_read_only());
  CHECK(std::memcmp(shared.data(), window.data(), window.size()) == 0);
  CHECK(mapped_as_huge(shared.data()) + mapped_as_huge(shared.data() + kHugePage) == 3 * kHugePage);

  window.data()[kHugePage + 5] ^= std::byte{1};
  CHECK(has_content(segment.data()));
  CHECK(shared.data()[kHugePage + 5] != window.data()[kHugePage + 5]);
  CHECK(same(0, 3 * kHugePage, kHugePage));
  CHECK(same(2 * kHugePage, 2 * kHugePage, kHugePage));
  CHECK(same(kHugePage + 6, kHugePage + 6, kHugePage - 6));
}

}  // namespace

TEST_CASE("a segment in transparent pages of 2 MiB is read through them by every mapping") {
  if (!host_has_them()) return;
  const TableSegment segment = segment_in(HugePages::kTransparent);
  CHECK(segment.size() == kBytes);
  CHECK(segment.page_bytes() == kHugePage);
  check_mappings(segment, kHugePages * kHugePage);
  check_window(segment);
}

TEST_CASE("pages of 2 MiB that could not be had are counted, and small ones are there") {
  if (emulator_lacks("PR_SET_THP_DISABLE")) return;
  REQUIRE(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
  const TableSegment segment = segment_in(HugePages::kTransparent);
  REQUIRE(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0);
  CHECK(segment.small_page_bytes() == kHugePages * kHugePage);
  CHECK(segment.page_bytes() == 4096);
  check_mappings(segment, 0);
}

TEST_CASE("a segment that asks for no pages of 2 MiB lacks none") {
  const TableSegment segment = segment_in(HugePages::kNo);
  CHECK(segment.small_page_bytes() == 0);
  CHECK(segment.page_bytes() == 4096);
  check_mappings(segment, 0);
  const TableSegment small = TableSegment::create(kPagesLabel, std::vector<TablePart>{},
                                                  kHugePage - 1, HugePages::kTransparent);
  CHECK(small.small_page_bytes() == 0);
}

TEST_CASE("a segment whose parts begin at a page of 2 MiB has no memory before it") {
  const std::byte* const data = content().data();
  size_t made = 0;
  const NextPart next = [&]() -> std::optional<TablePart> {
    if (made++ > 0) return std::nullopt;
    return TablePart{data, 2 * kHugePage + 1, kHugePage};
  };
  for (const HugePages pages : {HugePages::kNo, HugePages::kTransparent}) {
    made = 0;
    const TableSegment segment =
        TableSegment::create(kPagesLabel, next, 3 * kHugePage + 1, pages, kHugePage);
    CHECK(std::memcmp(segment.data() + kHugePage, data, 2 * kHugePage + 1) == 0);
    CHECK(bytes_taken(segment) == 2 * kHugePage + 2 * 4096);
    const std::vector<SegmentPages> pieces{{&segment, kHugePage, 2 * kHugePage}};
    const TableWindow window(pieces);
    window.populate();
    CHECK(std::memcmp(window.data(), data, 2 * kHugePage) == 0);
    CHECK(bytes_taken(segment) == 2 * kHugePage + 2 * 4096);
    made = 0;
    CHECK_THROWS_AS(TableSegment::create(kPagesLabel, next, 4 * kHugePage, pages, kHugePage + 1),
                    std::invalid_argument);
    CHECK_THROWS_AS(TableSegment::create(kPagesLabel, next, 4 * kHugePage, pages, 4095),
                    std::invalid_argument);
  }
}

TEST_CASE("a segment whose parts begin within a page of 2 MiB has no memory before them") {
  const std::byte* const data = content().data();
  constexpr size_t kFirst = kHugePage + 5 * 4096;
  for (const size_t bytes : {size_t{4096}, kHugePage - 5 * 4096, 2 * kHugePage, 3 * kHugePage}) {
    for (const HugePages pages : {HugePages::kNo, HugePages::kTransparent}) {
      for (const auto kind : {TableSegment::Kind::kConstant, TableSegment::Kind::kRefreshed}) {
        bool made = false;
        const NextPart next = [&]() -> std::optional<TablePart> {
          if (std::exchange(made, true)) return std::nullopt;
          return TablePart{data, bytes, kFirst};
        };
        const TableSegment segment =
            TableSegment::create(kPagesLabel, next, kFirst + bytes, pages, kFirst, kind);
        CHECK(std::memcmp(segment.data() + kFirst, data, bytes) == 0);
        CHECK(bytes_taken(segment) == bytes + 4096);
      }
    }
  }
}

TEST_CASE("a segment in pages of the host's pool is read through them by every mapping") {
  if (!pool_has_them()) return;
  const TableSegment segment = segment_in(HugePages::kPool);
  CHECK(segment.size() == kBytes);
  CHECK(segment.small_page_bytes() == 0);
  check_mappings(segment, (kHugePages + 1) * kHugePage);
  check_window(segment);
  const std::vector<SegmentPages> small{{&segment, 4096, kHugePage}};
  CHECK_THROWS_AS(TableWindow{small}, std::invalid_argument);
}

TEST_CASE("a pool without pages is an error that says how to fill it") {
  // No more than it takes: an emulator notes each page of an address space, in 50 bytes.
  const size_t pages = pages_of_host("nr_hugepages") + pages_of_host("nr_overcommit_hugepages") + 1;
  const std::vector<TablePart> none;
  const auto create = [&] {
    TableSegment::create(kPagesLabel, none, pages * kHugePage, HugePages::kPool);
  };
  check_failure(failure_of(create), ErrorKind::kRendezvous,
                std::to_string(pages) + " pages of 2 MiB needed from the host's pool");
  check_failure(failure_of(create), ErrorKind::kRendezvous, "vm.nr_hugepages");
}

TEST_CASE("a child that is forked while a segment is filled keeps nobody from sealing it") {
  std::vector<HugePages> kinds{HugePages::kNo, HugePages::kTransparent};
  if (pool_has_them()) kinds.push_back(HugePages::kPool);
  for (const HugePages pages : kinds) {
    const std::vector<std::byte> bytes(8192, std::byte{3});
    pid_t child = 0;
    const NextPart next = [&]() -> std::optional<TablePart> {
      if (child != 0) return std::nullopt;
      child = fork();
      if (child == 0) {
        for (;;) pause();
      }
      return TablePart{bytes.data(), bytes.size(), TableSegment::kFirstOffset};
    };
    const TableSegment segment = TableSegment::create(kPagesLabel, next, 4 * kHugePage, pages);
    CHECK(segment.data()[TableSegment::kFirstOffset] == std::byte{3});
    kill(child, SIGKILL);
    CHECK(waitpid(child, nullptr, 0) == child);
  }
}

TEST_CASE("pages of 2 MiB take turns among the nodes, whatever their number") {
  for (size_t nodes = 1; nodes <= 16; ++nodes) {
    for (size_t extent = 0; extent < 100; ++extent) {
      const size_t page = first_small_page(extent, nodes);
      CHECK(page < nodes);
      CHECK((extent * kHugePage / 4096 + page) % nodes == extent % nodes);
    }
  }
}
