#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lookup/direct/control_page.h"
#include "lookup/direct/table_segment.h"
#include "lookup/direct/version_name.h"
#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr ControlPage::Digest kLayout = {std::byte{1}, std::byte{2}};
const MemoryFileAddress kSomewhere{1, 2, 3, 4, 5};
/// Bytes of the header, in which other versions of this package have their magic as well.
constexpr size_t kHeader = 128, kOwner = 384, kSlots = 256 * 64;

Descriptor copy_of(int fd) { return Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

/// A segment of one owner, all of whose items are a number.
TableSegment segment_of(uint32_t owner, const std::string& version, uint64_t number) {
  const std::vector<uint64_t> items(64, number);
  const TablePart part{reinterpret_cast<const std::byte*>(items.data()), 512,
                       TableSegment::kFirstOffset};
  return TableSegment::create({owner, version, kLayout}, std::span(&part, 1),
                              TableSegment::kFirstOffset + part.bytes, HugePages::kNo);
}

void announce(ControlPage& page, uint32_t owner, const std::string& version,
              const MemoryFileAddress& segment = kSomewhere) {
  const uint64_t serial = page.serial() + 1;
  page.record(owner, serial, version, segment);
  page.announce(owner, serial);
}

/// A page of so many owners on which "first" serves.
ControlPage page_of(uint32_t owners) {
  ControlPage page = ControlPage::create(owners, kLayout);
  for (uint32_t owner = 0; owner < owners; ++owner) announce(page, owner, "first");
  REQUIRE(page.serving().name == "first");
  return page;
}

/// Sealed memory of a size that begins with some text.
Descriptor file_of(const std::string& text, size_t bytes) {
  Descriptor file = create_memory_file(bytes, {"a test", "Free some"});
  REQUIRE(pwrite(file.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  seal_memory_file(file.get(), Seal::kSize, {"a test", "Free some"});
  return file;
}

}  // namespace

TEST_CASE("a version serves when all owners have announced it") {
  ControlPage page = ControlPage::create(3, kLayout);
  CHECK(page.serial() == 0);
  CHECK(page.serving().name.empty());
  announce(page, 0, "first");
  announce(page, 2, "first");
  CHECK(page.serial() == 0);
  CHECK(page.pending(2).name == "first");
  announce(page, 1, "first");
  CHECK(page.serving().serial == 1);
  CHECK(page.serving().name == "first");
  CHECK(page.pending(2).name.empty());
}

TEST_CASE("owners that have announced different versions change nothing") {
  ControlPage page = page_of(2);
  announce(page, 0, "2");
  announce(page, 1, "3");
  CHECK(page.serving().name == "first");
  CHECK(page.pending(0).name == "2");
  CHECK(page.pending(1).name == "3");
  CHECK(page.withdraw(0));
  CHECK(page.pending(0).name.empty());
  CHECK(page.withdrawn(0).name == "2");
  CHECK(page.withdrawn(0).serial == 2);
  announce(page, 0, "3");
  CHECK(page.serving().serial == 2);
  CHECK(page.serving().name == "3");
  // An earlier one again.
  announce(page, 1, "first");
  CHECK(page.serving().name == "3");
  announce(page, 0, "first");
  CHECK(page.serving().name == "first");
  CHECK(page.serial() == 3);
}

TEST_CASE("what serves can't be withdrawn, and what is not announced need not be") {
  ControlPage page = page_of(1);
  CHECK_FALSE(page.withdraw(0));
  CHECK(page.serving().name == "first");
  ControlPage fresh = ControlPage::create(2, kLayout);
  CHECK(fresh.withdraw(0));
  CHECK(fresh.withdrawn(0).name.empty());
}

TEST_CASE("an owner that goes ahead leaves the record of what serves") {
  ControlPage page = page_of(2);
  const MemoryFileAddress first{4'000'000, 2'000'000'000, 1, uint64_t{1} << 63, 4};
  announce(page, 0, "2", first);
  announce(page, 1, "2");
  for (const char* version : {"3", "4", "5"}) {
    announce(page, 0, version);
    const std::optional<ControlPage::Recorded> found = page.recorded(0, 2);
    REQUIRE(found);
    CHECK(found->name == "2");
    CHECK(found->segment.pid == first.pid);
    CHECK(found->segment.fd == first.fd);
    CHECK(found->segment.device == first.device);
    CHECK(found->segment.inode == first.inode);
    CHECK(found->segment.bytes == first.bytes);
    CHECK(page.serving().name == "2");
    CHECK(page.withdraw(0));
  }
  CHECK_FALSE(page.recorded(0, 1));  // overwritten
  CHECK_FALSE(page.recorded(1, 7));
}

TEST_CASE("only the next version is announced, and only what is recorded") {
  ControlPage page = page_of(2);
  CHECK_THROWS_AS(page.announce(0, 2), std::invalid_argument);
  page.record(0, 3, "3", kSomewhere);
  CHECK_THROWS_AS(page.announce(0, 3), std::invalid_argument);
  CHECK_THROWS_AS(page.record(0, 2, "", kSomewhere), std::invalid_argument);
  CHECK_THROWS_AS(page.record(0, 2, std::string(65, 'x'), kSomewhere), std::invalid_argument);
  announce(page, 0, std::string(64, 'x'));
  CHECK(page.pending(0).name == std::string(64, 'x'));
}

TEST_CASE("a version is 1 to 64 bytes of UTF-8") {
  for (const char* text : {"a", "2026-11-27", "\u00e9", "\u20ac", "\U0001F600", "\U0010FFFF"}) {
    CHECK(is_version(text));
  }
  using namespace std::string_literals;
  for (const std::string& text : {""s, "a\0b"s, std::string(65, 'a'), "\x80"s, "\xC3"s, "\xC3("s,
                                  "\xC0\x80"s, "\xC1\xBF"s, "\xE0\x80\x80"s, "\xED\xA0\x80"s,
                                  "\xF4\x90\x80\x80"s, "\xF0\x80\x80\x80"s, "\xFF"s, "\xE2\x82"s}) {
    CHECK_FALSE(is_version(text));
  }
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

TEST_CASE("a page says who has abandoned it first") {
  ControlPage page = ControlPage::create(2, kLayout);
  CHECK_FALSE(page.abandoned_by());
  page.abandon(1);
  page.abandon(0);
  CHECK(page.abandoned_by() == 1);
}

TEST_CASE("a page is found by its address and by its descriptor") {
  ControlPage page = ControlPage::create(2, kLayout);
  const ControlPage opened = ControlPage::open(page.address(), 2, kLayout);
  const ControlPage adopted = ControlPage::adopt(copy_of(page.descriptor()), 2, kLayout);
  announce(page, 0, "first");
  CHECK(opened.pending(0).name == "first");
  CHECK(adopted.pending(0).name == "first");
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
  const TableSegment segment = segment_of(0, "1", 1);
  check_refused(segment.descriptor(), 2, kLayout, "not sealed, or of another size");
  const Descriptor unsealed =
      create_memory_file(kHeader + 2 * kOwner + kSlots, {"a test", "Free some"});
  check_refused(unsealed.get(), 2, kLayout, "not sealed");
  seal_memory_file(unsealed.get(), Seal::kSize, {"a test", "Free some"});
  check_refused(unsealed.get(), 2, kLayout, "is none");
  // As the versions before had it: the second one had no slots of readers, the third one no sides.
  check_refused(file_of("tbbneg01", 64 + 2 * 128).get(), 2, kLayout,
                "is of another version of torchrec-bls");
  check_refused(file_of("tbbneg02", 64 + 2 * kOwner).get(), 2, kLayout,
                "is of another version of torchrec-bls");
  check_refused(file_of("tbbneg03", 64 + 2 * kOwner + kSlots).get(), 2, kLayout,
                "is of another version of torchrec-bls");
  CHECK_THROWS_AS(ControlPage::create(0, kLayout), std::invalid_argument);
  CHECK_THROWS_AS(page.pending(2), std::invalid_argument);
}

TEST_CASE("what no owner may have written is refused") {
  // The length of the name in the second record, which is the first version's.
  constexpr size_t kLength = kHeader + 16 + 14 * 8 + 8;
  for (const uint64_t length : {uint64_t{0}, uint64_t{7}, uint64_t{1000}, ~uint64_t{0}}) {
    ControlPage page = page_of(1);
    REQUIRE(pwrite(page.descriptor(), &length, sizeof(length), kLength) == sizeof(length));
    check_failure(failure_of([&] { page.serving(); }), ErrorKind::kProtocol,
                  "names a version by other than 1 to 64 bytes of UTF-8");
  }
  ControlPage page = page_of(1);
  const uint64_t serial = 9;
  REQUIRE(pwrite(page.descriptor(), &serial, sizeof(serial), kLength - 8) == sizeof(serial));
  check_failure(failure_of([&] { page.serving(); }), ErrorKind::kProtocol, "has no record");
}

TEST_CASE("readers that follow see all of a version of all owners") {
  constexpr uint32_t kOwners = 2;
  constexpr uint64_t kLast = 60;
  ControlPage page = ControlPage::create(kOwners, kLayout);
  std::atomic<int> readers_left = 2;
  std::vector<std::thread> threads;
  for (uint32_t owner = 0; owner < kOwners; ++owner) {
    threads.emplace_back([&, owner] {
      std::vector<TableSegment> kept;  // two at a time, as publish() does
      for (uint64_t number = 1; number <= kLast; ++number) {
        while (page.serial() + 1 < number) std::this_thread::yield();
        const std::string version = "version " + std::to_string(number);
        kept.push_back(segment_of(owner, version, number));
        announce(page, owner, version, kept.back().address());
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
        const uint64_t serial = page.serial();
        if (serial == read) continue;
        try {
          for (uint32_t owner = 0; owner < kOwners; ++owner) {
            const std::optional<ControlPage::Recorded> found = page.recorded(owner, serial);
            if (!found) throw std::runtime_error("overtaken");
            wrong += found->name != "version " + std::to_string(serial);
            const TableSegment segment =
                TableSegment::open(found->segment, {owner, found->name, kLayout});
            uint64_t item = 0;
            std::memcpy(&item, segment.data() + TableSegment::kFirstOffset, sizeof(item));
            wrong += item != serial;
          }
          read = serial;
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

TEST_CASE("owners that skip, withdraw and are overtaken never serve different versions") {
  constexpr uint32_t kOwners = 3;
  constexpr int kTries = 3000;
  ControlPage page = page_of(kOwners);
  std::atomic<uint32_t> owners_left = kOwners;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (uint32_t owner = 0; owner < kOwners; ++owner) {
    threads.emplace_back([&, owner] {
      uint64_t random = owner + 1;
      // On one processor an owner may be alone for all its tries.
      for (int i = 0; i < kTries || page.serial() == 1; ++i) {
        if (i % 16 == 0) std::this_thread::yield();
        random = random * 6364136223846793005u + 1442695040888963407u;
        if (!page.pending(owner).name.empty()) page.withdraw(owner);
        const uint64_t serial = page.serial() + 1;
        // Two names, so that owners often agree and often do not.
        page.record(owner, serial, random >> 63 != 0 ? "left" : "right",
                    {static_cast<int32_t>(serial), 0, 0, 0, 0});
        page.announce(owner, serial);
      }
      --owners_left;
    });
  }
  threads.emplace_back([&] {
    while (owners_left > 0) {
      const uint64_t serial = page.serial();
      std::vector<ControlPage::Recorded> all;
      for (uint32_t owner = 0; owner < kOwners; ++owner) {
        const std::optional<ControlPage::Recorded> found = page.recorded(owner, serial);
        if (found) all.push_back(*found);
      }
      if (all.size() < kOwners) {
        wrong += page.serial() == serial;  // something serves of which there is no record
        continue;
      }
      for (const ControlPage::Recorded& each : all) {
        wrong += each.name != all[0].name;
        wrong += serial > 1 && each.segment.pid != static_cast<int32_t>(serial);
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(page.serial() > 1);
}
