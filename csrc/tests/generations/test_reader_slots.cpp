#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lookup/direct/control_page.h"
#include "lookup/direct/reader_slot.h"
#include "lookup/direct/reader_slots.h"

using namespace bls;

namespace {

constexpr uint64_t kFilling = uint64_t{1} << 63;

bool everybody(uint64_t) { return true; }
bool nobody(uint64_t) { return false; }

/// Oldest serials by process, of slots that no two readers share.
std::map<uint64_t, uint64_t> told(const std::vector<TableReader>& readers) {
  std::map<uint64_t, uint64_t> found;
  for (const TableReader& each : readers) CHECK(found.emplace(each.process, each.oldest).second);
  return found;
}

using Told = std::map<uint64_t, uint64_t>;

int status_of_child(const std::function<bool()>& act) {
  const pid_t child = fork();
  if (child == 0) _exit(act() ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

}  // namespace

TEST_CASE("readers say which version they hold, and leave") {
  ReaderSlots slots{};
  CHECK(slots.readers().empty());
  const std::optional<uint32_t> first = slots.take({7, 1}, everybody);
  const std::optional<uint32_t> second = slots.take({8, 3}, everybody);
  REQUIRE(first);
  REQUIRE(second);
  CHECK(told(slots.readers()) == Told{{7, 1}, {8, 3}});
  slots.tell(*first, 4);
  CHECK(told(slots.readers()) == Told{{7, 4}, {8, 3}});
  slots.leave(*first);
  CHECK(told(slots.readers()) == Told{{8, 3}});
  CHECK(slots.take({9, 2}, everybody) == first);
  CHECK(told(slots.readers()) == Told{{8, 3}, {9, 2}});
}

TEST_CASE("the slot of a dead process is taken once no other one is free") {
  ReaderSlots slots{};
  for (uint64_t process = 1; process <= ReaderSlots::kSlots; ++process) {
    // While there are free ones nobody is asked.
    CHECK(slots.take({process, 1}, [](uint64_t) -> bool { throw std::runtime_error("asked"); }));
  }
  CHECK_FALSE(slots.take({1000, 2}, everybody));
  CHECK_THROWS_AS(slots.take({1000, 2}, [](uint64_t) -> bool { throw std::runtime_error("?"); }),
                  std::runtime_error);
  CHECK(slots.readers().size() == ReaderSlots::kSlots);
  const auto is_alive = [](uint64_t process) { return process != 200; };
  CHECK(slots.take({1000, 2}, is_alive) == 199);
  const Told found = told(slots.readers());
  CHECK(found.size() == ReaderSlots::kSlots);
  CHECK(found.count(200) == 0);
  CHECK(found.at(1000) == 2);
}

TEST_CASE("one that died while it filled its slot is not seen, and its slot is free") {
  ReaderSlots slots{};
  for (uint64_t process = 1; process <= ReaderSlots::kSlots; ++process) {
    REQUIRE(slots.take({process, 1}, everybody));
  }
  const uint64_t filling = kFilling | 5;
  std::memcpy(reinterpret_cast<std::byte*>(&slots) + 4 * 64, &filling, sizeof(filling));
  CHECK(told(slots.readers()).count(5) == 0);
  CHECK(slots.take({1000, 9}, [](uint64_t process) { return process != 5; }) == 4);
}

TEST_CASE("what is no number of a process takes no slot") {
  ReaderSlots slots{};
  CHECK_THROWS_AS(slots.take({0, 1}, everybody), std::invalid_argument);
  CHECK_THROWS_AS(slots.take({kFilling | 1, 1}, everybody), std::invalid_argument);
  CHECK(slots.readers().empty());
}

TEST_CASE("no slot is taken twice, and no reader is seen with another one's version") {
  constexpr uint64_t kThreads = 4;
  constexpr int kTries = 4000;
  const auto slots = std::make_unique<ReaderSlots>();
  // All but two are living processes' already, so that those are contended for.
  for (uint64_t process = 1000; process < 1000 + ReaderSlots::kSlots - 2; ++process) {
    REQUIRE(slots->take({process, process}, everybody));
  }
  std::atomic<uint64_t> left = kThreads;
  std::atomic<int> wrong = 0, taken = 0;
  std::vector<std::thread> threads;
  for (uint64_t process = 1; process <= kThreads; ++process) {
    threads.emplace_back([&, process] {
      for (int i = 0; i < kTries; ++i) {
        const std::optional<uint32_t> slot = slots->take({process, process}, everybody);
        if (!slot) {
          std::this_thread::yield();
          continue;
        }
        ++taken;
        slots->tell(*slot, process + 100);
        int own = 0;
        for (const TableReader& each : slots->readers()) own += each.process == process;
        wrong += own != 1;
        slots->leave(*slot);
      }
      --left;
    });
  }
  threads.emplace_back([&] {
    while (left > 0) {
      for (const TableReader& each : slots->readers()) {
        wrong += each.oldest != each.process && each.oldest != each.process + 100;
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(taken > 0);
  CHECK(slots->readers().size() == ReaderSlots::kSlots - 2);
}

TEST_CASE("a page has slots behind its owners, which all of its processes see") {
  ControlPage page = ControlPage::create(3, {});
  const ControlPage other = ControlPage::open(page.address(), 3, {});
  {
    std::optional<ReaderSlot> slot = ReaderSlot::take(page, {7, 1}, everybody);
    REQUIRE(slot);
    CHECK(told(other.readers()) == Told{{7, 1}});
    slot->tell(2);
    const ReaderSlot moved = std::move(*slot);
    slot.reset();
    CHECK(told(other.readers()) == Told{{7, 2}});
    for (uint32_t owner = 0; owner < 3; ++owner) {  // no owner's words are among them
      page.record(owner, 1, "first", {1, 2, 3, 4, 5});
      page.announce(owner, 1);
    }
    CHECK(page.serving().name == "first");
    CHECK(told(other.readers()) == Told{{7, 2}});
  }
  CHECK(other.readers().empty());
}

TEST_CASE("a forked child has a slot of its own, and leaves its parent's as it is") {
  ControlPage page = ControlPage::create(1, {});
  std::optional<ReaderSlot> slot = ReaderSlot::take(page, {7, 1}, everybody);
  REQUIRE(slot);
  const auto is_refused = [](const auto& act) {
    try {
      act();
    } catch (const std::invalid_argument& error) {
      return std::string(error.what()).find("was forked from") != std::string::npos;
    }
    return false;
  };
  CHECK(status_of_child([&] {
          if (!is_refused([&] { slot->tell(9); })) return false;
          if (!is_refused([&] { ReaderSlot::take(page, {8, 1}, nobody); })) return false;
          slot.reset();
          Descriptor file(fcntl(page.descriptor(), F_DUPFD_CLOEXEC, 0));
          ControlPage own = ControlPage::adopt(std::move(file), 1, {});
          const std::optional<ReaderSlot> of_child = ReaderSlot::take(own, {8, 2}, everybody);
          return of_child && page.readers().size() == 2;
        }) == 0);
  CHECK(told(page.readers()) == Told{{7, 1}});
}
