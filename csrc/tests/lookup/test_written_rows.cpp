#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "errors.h"
#include "lookup/direct/table_segment.h"
#include "lookup/direct/table_window.h"
#include "lookup/direct/written_rows.h"
#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr size_t kFirstPlace = TableSegment::kFirstOffset;
const TableLabel kRefreshedLabel{0, "seven", {std::byte{1}}};

/// A segment of some pages, all of zeros.
TableSegment zeros_of(size_t pages, TableSegment::Kind kind) {
  const NextPart nothing = []() -> std::optional<TablePart> { return std::nullopt; };
  return TableSegment::create(kRefreshedLabel, nothing, kFirstPlace + pages * kTablePage,
                              HugePages::kNo, kFirstPlace, kind);
}

TableSegment refreshed(size_t pages) { return zeros_of(pages, TableSegment::Kind::kRefreshed); }

int status_of_fork(const auto& act) {
  const pid_t child = fork();
  if (child == 0) _exit(act() ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

bool can_be_mapped_to_write(int fd) {
  void* const at = mmap(nullptr, kTablePage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return false;
  munmap(at, kTablePage);
  return true;
}

}  // namespace

TEST_CASE("what the creator of a refreshed segment writes, all mappings show") {
  TableSegment first = refreshed(2);
  const TableSegment segment = std::move(first);
  CHECK(first.writable() == nullptr);
  REQUIRE(segment.writable() != nullptr);
  const TableSegment opened = TableSegment::open(segment.address(), kRefreshedLabel);
  CHECK(opened.kind() == TableSegment::Kind::kRefreshed);
  CHECK(opened.writable() == nullptr);
  const std::vector<SegmentPages> pages{{&opened, kFirstPlace, 2 * kTablePage}};
  const TableWindow window(pages);
  window.populate();
  CHECK(window.data()[8] == std::byte{0});
  segment.writable()[kFirstPlace + 8] = std::byte{7};
  CHECK(segment.data()[kFirstPlace + 8] == std::byte{7});
  CHECK(opened.data()[kFirstPlace + 8] == std::byte{7});
  CHECK(window.data()[8] == std::byte{7});
}

TEST_CASE("nobody but its creator can write to a refreshed segment, and no child of it") {
  TableSegment segment = refreshed(1);
  const TableSegment opened = TableSegment::open(segment.address(), kRefreshedLabel);
  for (const int fd : {segment.descriptor(), opened.descriptor()}) {
    CHECK_FALSE(can_be_mapped_to_write(fd));
    CHECK(pwrite(fd, "x", 1, kFirstPlace) < 0);
    CHECK(ftruncate(fd, 10) != 0);
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kTablePage) != 0);
  }
  CHECK(mprotect(const_cast<std::byte*>(opened.data()), kTablePage, PROT_READ | PROT_WRITE) != 0);
  if (emulator_lacks("MADV_DONTFORK")) return;
  std::byte* const where = segment.writable();
  CHECK(status_of_fork([&] {
          if (segment.writable() != nullptr) return false;
          // Its place is free, and what the child has there is not the segment's to unmap.
          void* const own = mmap(where, kTablePage, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
          if (own != where) return false;
          { const TableSegment gone = std::move(segment); }
          where[0] = std::byte{1};
          return true;
        }) == 0);
  CHECK(segment.data()[kFirstPlace] == std::byte{0});
}

TEST_CASE("a constant segment is not taken for one that is refreshed") {
  const TableSegment segment = zeros_of(1, TableSegment::Kind::kConstant);
  CHECK(segment.writable() == nullptr);
  CHECK(TableSegment::open(segment.address(), kRefreshedLabel).kind() ==
        TableSegment::Kind::kConstant);
  // The bytes of a constant one, which somebody can still write to.
  Descriptor file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(pwrite(file.get(), segment.data(), segment.size(), 0) ==
          static_cast<ssize_t>(segment.size()));
  REQUIRE(fcntl(file.get(), F_ADD_SEALS,
                F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0);
  check_failure(failure_of([&] { TableSegment::adopt(std::move(file), kRefreshedLabel); }),
                ErrorKind::kProtocol, "is not sealed");
}

TEST_CASE("rows are written where they lie, whichever pieces that is") {
  constexpr size_t kRow = 96;  // does not divide a page
  constexpr size_t kPages = 9, kCount = kPages * kTablePage / kRow;
  const TableSegment first = refreshed(8), second = refreshed(8);
  const std::vector<SegmentPages> pieces{{&first, kFirstPlace + 3 * kTablePage, 2 * kTablePage},
                                         {&second, kFirstPlace, kTablePage},
                                         {&first, kFirstPlace, 3 * kTablePage},
                                         {&second, kFirstPlace + 5 * kTablePage, 3 * kTablePage}};
  const TableWindow window(pieces);
  std::vector<std::byte> expected(kPages * kTablePage, std::byte{0});
  std::mt19937_64 random(7);
  for (int delta = 0; delta < 20; ++delta) {
    std::vector<int64_t> ids;
    std::vector<std::byte> rows;
    for (int i = 0; i < 60; ++i) {
      ids.push_back(static_cast<int64_t>(random() % kCount));  // some of them twice
      for (size_t byte = 0; byte < kRow; ++byte) rows.push_back(static_cast<std::byte>(random()));
      std::memcpy(expected.data() + static_cast<size_t>(ids.back()) * kRow,
                  rows.data() + rows.size() - kRow, kRow);
    }
    write_rows(pieces, kRow, ids, rows.data());
    REQUIRE(std::memcmp(window.data(), expected.data(), expected.size()) == 0);
  }
}

TEST_CASE("rows are copied to where the same table lies elsewhere") {
  constexpr size_t kRow = 96, kPages = 6, kCount = kPages * kTablePage / kRow;
  const TableSegment first = refreshed(6), second = refreshed(3), third = refreshed(4);
  // Each half lies where it does in its segments.
  const std::vector<SegmentPages> sources{{&first, kFirstPlace + 4 * kTablePage, 2 * kTablePage},
                                          {&first, kFirstPlace, 4 * kTablePage}},
      pieces{{&second, kFirstPlace + kTablePage, 2 * kTablePage},
             {&third, kFirstPlace, 4 * kTablePage}};
  std::mt19937_64 random(7);
  for (const SegmentPages& source : sources) {
    for (size_t byte = 0; byte < source.bytes; ++byte) {
      first.writable()[source.offset + byte] = static_cast<std::byte>(random());
    }
  }
  const TableWindow here(sources), there(pieces);
  std::vector<std::byte> expected(kPages * kTablePage, std::byte{0});
  std::vector<int64_t> ids{static_cast<int64_t>(2 * kTablePage / kRow)};  // in both halves
  for (int i = 0; i < 40; ++i) ids.push_back(static_cast<int64_t>(random() % kCount));
  for (const int64_t id : ids) {
    const size_t at = static_cast<size_t>(id) * kRow;
    std::memcpy(expected.data() + at, here.data() + at, kRow);
  }
  copy_rows(sources, pieces, kRow, ids);
  CHECK(std::memcmp(there.data(), expected.data(), expected.size()) == 0);
  const std::vector<SegmentPages> shorter{sources[0], {&first, kFirstPlace, 2 * kTablePage}};
  for (const auto& other : {shorter, {sources[0]}, {sources[1], sources[0]}}) {
    CHECK_THROWS_AS(copy_rows(other, pieces, kRow, ids), std::invalid_argument);
  }
  CHECK_THROWS_AS(copy_rows(sources, pieces, kRow, std::vector<int64_t>{kCount}),
                  std::invalid_argument);
}

TEST_CASE("what can't be written as a whole is not begun") {
  const TableSegment segment = refreshed(1), constant = zeros_of(1, TableSegment::Kind::kConstant);
  const std::vector<SegmentPages> own{{&segment, kFirstPlace, kTablePage}};
  const std::vector<std::byte> rows(3 * 64, std::byte{1});
  const auto check_refused = [&](const std::vector<SegmentPages>& pieces, size_t row_bytes,
                                 const std::vector<int64_t>& ids) {
    CHECK_THROWS_AS(write_rows(pieces, row_bytes, ids, rows.data()), std::invalid_argument);
  };
  check_refused(own, 64, {0, 1, 64});
  check_refused(own, 64, {0, 1, -1});
  check_refused(own, 60, {0});
  check_refused(own, 0, {0});
  check_refused({{&segment, kFirstPlace, kTablePage}, {&constant, kFirstPlace, kTablePage}}, 64,
                {0});
  check_refused({{&segment, kFirstPlace + 64, kTablePage}}, 64, {0});
  check_refused({}, 64, {0});
  for (size_t i = 0; i < kTablePage; ++i) REQUIRE(segment.data()[kFirstPlace + i] == std::byte{0});
  write_rows(own, 64, std::vector<int64_t>{}, nullptr);
  write_rows(own, 64, std::vector<int64_t>{63}, rows.data());
  CHECK(segment.data()[kFirstPlace + kTablePage - 1] == std::byte{1});
}
