#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lookup/direct/control_page.h"
#include "lookup/direct/table_segment.h"
#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr ControlPage::Digest kLayout = {std::byte{1}, std::byte{2}};

Descriptor copy_of(int fd) { return Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

/// A segment of one owner, all of whose items are its generation.
TableSegment segment_of(uint32_t owner, uint64_t generation) {
  const std::vector<uint64_t> items(64, generation);
  const TablePart part{reinterpret_cast<const std::byte*>(items.data()), 512,
                       TableSegment::kFirstOffset};
  return TableSegment::create({owner, generation, kLayout}, std::span(&part, 1),
                              TableSegment::kFirstOffset + part.bytes, false);
}

}  // namespace

TEST_CASE("a generation is complete when all owners have announced it") {
  ControlPage page = ControlPage::create(3, kLayout);
  CHECK(page.complete() == 0);
  page.announce(0, 1);
  page.announce(2, 2);
  CHECK(page.complete() == 0);
  page.announce(1, 1);
  CHECK(page.complete() == 1);
  CHECK(page.announced(2) == 2);
}

TEST_CASE("the segments of two generations are recorded side by side") {
  ControlPage page = ControlPage::create(2, kLayout);
  const MemoryFileAddress first{4'000'000, 2'000'000'000, 1, uint64_t{1} << 63, 4};
  page.record(1, 7, first);
  page.record(1, 8, {5, 6, 7, 8, 9});
  const MemoryFileAddress found = page.recorded(1, 7);
  CHECK(found.pid == first.pid);
  CHECK(found.fd == first.fd);
  CHECK(found.device == first.device);
  CHECK(found.inode == first.inode);
  CHECK(found.bytes == first.bytes);
  CHECK(page.recorded(1, 8).pid == 5);
  CHECK(page.recorded(0, 7).pid == 0);
}

TEST_CASE("one of several processes takes an owner over") {
  ControlPage page = ControlPage::create(1, kLayout);
  std::atomic<int> taken = 0;
  std::vector<std::thread> threads;
  for (uint64_t own = 1; own <= 4; ++own) {
    threads.emplace_back([&, own] { taken += page.take_over(0, 0, own); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(taken == 1);
  CHECK(page.process(0) != 0);
  CHECK_FALSE(page.take_over(0, 0, 5));
}

TEST_CASE("a page is found by its address and by its descriptor") {
  ControlPage page = ControlPage::create(2, kLayout);
  const ControlPage opened = ControlPage::open(page.address(), 2, kLayout);
  const ControlPage adopted = ControlPage::adopt(copy_of(page.descriptor()), 2, kLayout);
  page.announce(0, 5);
  CHECK(opened.announced(0) == 5);
  CHECK(adopted.announced(0) == 5);
}

TEST_CASE("what is no page of these tables is refused") {
  const ControlPage page = ControlPage::create(2, kLayout);
  const auto check_refused = [](int fd, uint32_t owners, const ControlPage::Digest& layout,
                                const std::string& text) {
    check_failure(failure_of([&] { ControlPage::adopt(copy_of(fd), owners, layout); }),
                  ErrorKind::kProtocol, text);
  };
  check_refused(page.descriptor(), 3, kLayout, "of another size");
  check_refused(page.descriptor(), 2, {}, "other owners or shards");
  const TableSegment segment = segment_of(0, 1);
  check_refused(segment.descriptor(), 2, kLayout, "not sealed, or of another size");
  const Descriptor unsealed = create_memory_file(64 + 2 * 128, {"a test", "Free some"});
  check_refused(unsealed.get(), 2, kLayout, "not sealed");
  seal_memory_file(unsealed.get(), false, {"a test", "Free some"});
  check_refused(unsealed.get(), 2, kLayout, "is none");
  CHECK_THROWS_AS(ControlPage::create(0, kLayout), std::invalid_argument);
  CHECK_THROWS_AS(page.announced(2), std::invalid_argument);
}

TEST_CASE("readers that follow see all of a generation of all owners") {
  constexpr uint32_t kOwners = 2;
  constexpr uint64_t kLast = 60;
  ControlPage page = ControlPage::create(kOwners, kLayout);
  std::atomic<int> readers_left = 2;
  std::vector<std::thread> threads;
  for (uint32_t owner = 0; owner < kOwners; ++owner) {
    threads.emplace_back([&, owner] {
      std::vector<TableSegment> kept;  // two at a time, as publish() does
      for (uint64_t generation = 1; generation <= kLast; ++generation) {
        while (page.complete() + 1 < generation) std::this_thread::yield();
        kept.push_back(segment_of(owner, generation));
        page.record(owner, generation, kept.back().address());
        page.announce(owner, generation);
        if (kept.size() > 2) kept.erase(kept.begin());
      }
      while (readers_left > 0) std::this_thread::yield();
    });
  }
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      uint64_t read = 0;
      while (read < kLast) {
        const uint64_t complete = page.complete();
        if (complete == read) continue;
        try {
          for (uint32_t owner = 0; owner < kOwners; ++owner) {
            const TableSegment segment =
                TableSegment::open(page.recorded(owner, complete), {owner, complete, kLayout});
            uint64_t item = 0;
            std::memcpy(&item, segment.data() + TableSegment::kFirstOffset, sizeof(item));
            wrong += item != complete;
          }
          read = complete;
        } catch (const std::runtime_error&) {
          // Overtaken: the next look finds a newer one.
          std::this_thread::yield();
        }
      }
      --readers_left;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}
