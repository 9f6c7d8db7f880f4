#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
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

using ProcessNumbers = std::vector<uint64_t>;

bool each_lives(uint64_t) { return true; }
bool none_lives(uint64_t) { return false; }

/// The slot of a process, by its number.
ReaderSlot slot_of(ControlPage& page, uint64_t process) {
  std::optional<ReaderSlot> slot = ReaderSlot::take(page, {process, 1}, each_lives);
  REQUIRE(slot);
  return std::move(*slot);
}

}  // namespace

TEST_CASE("a side that has the version is pinned until the pin is gone") {
  ControlPage page = ControlPage::create(1, {});
  const ControlPage other = ControlPage::open(page.address(), 1, {});
  ReaderSlot slot = slot_of(page, 7);
  ReaderSlot second = slot_of(page, 8);
  CHECK(other.serial_on(1) == 0);
  page.set_serial_on(1, 5);
  CHECK(other.serial_on(1) == 5);
  CHECK(other.serial_on(0) == 0);
  {
    std::optional<SidePin> pin = slot.pin(1, 5);
    REQUIRE(pin);
    CHECK(other.holders(1) == ProcessNumbers{7});
    CHECK(other.holders(0).empty());
    const std::optional<SidePin> again = slot.pin(1, 5), of_second = second.pin(1, 5);
    REQUIRE(again);
    REQUIRE(of_second);
    CHECK(other.holders(1) == ProcessNumbers{7, 8});
    pin.reset();
    CHECK(other.holders(1) == ProcessNumbers{7, 8});
    page.set_serial_on(1, 0);  // stops none_lives who has a pin
    CHECK(other.holders(1) == ProcessNumbers{7, 8});
  }
  CHECK(other.holders(1).empty());
}

TEST_CASE("a side with another version is not pinned") {
  ControlPage page = ControlPage::create(1, {});
  ReaderSlot slot = slot_of(page, 7);
  CHECK_FALSE(slot.pin(0, 5));
  CHECK_FALSE(slot.pin(0, 0));  // that it has none is no version
  page.set_serial_on(0, 5);
  page.set_serial_on(1, 6);
  CHECK_FALSE(slot.pin(0, 6));
  CHECK_FALSE(slot.pin(1, 5));
  CHECK(page.holders(0).empty());
  CHECK(page.holders(1).empty());
  // Two versions later it is another one, though the side is the same.
  page.set_serial_on(0, 7);
  CHECK_FALSE(slot.pin(0, 5));
  CHECK(slot.pin(0, 7));
  CHECK(page.holders(0).empty());
}

TEST_CASE("a pin that is moved counts once") {
  ControlPage page = ControlPage::create(1, {});
  ReaderSlot slot = slot_of(page, 7);
  page.set_serial_on(0, 1);
  std::optional<SidePin> pin = slot.pin(0, 1);
  REQUIRE(pin);
  {
    const SidePin moved = std::move(*pin);
    pin.reset();
    CHECK(page.holders(0) == ProcessNumbers{7});
  }
  CHECK(page.holders(0).empty());
}

TEST_CASE("there are two sides") {
  ControlPage page = ControlPage::create(1, {});
  ReaderSlot slot = slot_of(page, 7);
  CHECK_THROWS_AS(page.set_serial_on(2, 1), std::out_of_range);
  CHECK_THROWS_AS(page.serial_on(2), std::out_of_range);
  CHECK_THROWS_AS(page.holders(2), std::out_of_range);
  CHECK_THROWS_AS(slot.pin(2, 1), std::out_of_range);
}

TEST_CASE("the pins of a dead process go with its slot") {
  ReaderSlots slots{};
  for (uint64_t process = 1; process <= ReaderSlots::kSlots; ++process) {
    REQUIRE(slots.take({process, 1}, each_lives));
  }
  slots.pin(6, 0);
  slots.pin(6, 1);
  slots.pin(6, 1);
  CHECK(slots.holders(0) == ProcessNumbers{7});  // whoever waits for it asks whether it is alive
  CHECK(slots.holders(1) == ProcessNumbers{7});
  CHECK(slots.take({1000, 1}, [](uint64_t process) { return process != 7; }) == 6);
  CHECK(slots.holders(0).empty());
  CHECK(slots.holders(1).empty());
  slots.pin(6, 1);
  CHECK(slots.holders(1) == ProcessNumbers{1000});
  slots.leave(6);
  CHECK(slots.holders(1).empty());
}

TEST_CASE("a forked child pins nothing with its parent's slot, and takes back no pin of it") {
  ControlPage page = ControlPage::create(1, {});
  ReaderSlot slot = slot_of(page, 7);
  page.set_serial_on(0, 1);
  std::optional<SidePin> pin = slot.pin(0, 1);
  REQUIRE(pin);
  const auto is_refused = [](const auto& act) {
    try {
      act();
    } catch (const std::invalid_argument& error) {
      return std::string(error.what()).find("was forked from") != std::string::npos;
    }
    return false;
  };
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        is_refused([&] { slot.pin(0, 1); }) && is_refused([&] { page.set_serial_on(0, 2); });
    pin.reset();
    ControlPage own =
        ControlPage::adopt(Descriptor(fcntl(page.descriptor(), F_DUPFD_CLOEXEC, 0)), 1, {});
    std::optional<ReaderSlot> of_child = ReaderSlot::take(own, {8, 1}, none_lives);
    const std::optional<SidePin> own_pin = of_child->pin(0, 1);
    _exit(refused && own_pin && own.holders(0) == ProcessNumbers{7, 8} ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  // The child was killed with its pin, as it were. It is not alive any more.
  CHECK(page.holders(0) == ProcessNumbers{7, 8});
  pin.reset();
  CHECK(page.holders(0) == ProcessNumbers{8});
}

TEST_CASE("whoever has a pin reads one version, while the keeper writes others in place") {
  constexpr uint64_t kLeast = 2000;
  constexpr int kOften = 100;
  constexpr size_t kRows = 64;
  constexpr int kProcesses = 2, kThreads = 2;
  ControlPage page = ControlPage::create(1, {});
  // Plain memory, so that the thread sanitizer sees each read that a write may meet.
  std::array<std::vector<uint64_t>, ReaderSlots::kSides> rows;
  rows.fill(std::vector<uint64_t>(kRows, 0));
  const auto side_of = [](uint64_t serial) { return static_cast<uint32_t>(serial % 2); };
  std::atomic<uint64_t> serves = 0;
  std::atomic<int> torn = 0, early = 0, refused = 0, read = 0;
  std::atomic<bool> done = false;
  const auto publish = [&](uint64_t serial) {
    const uint32_t side = side_of(serial);
    page.set_serial_on(side, 0);
    while (!page.holders(side).empty()) std::this_thread::yield();
    for (uint64_t& row : rows[side]) row = serial;
    page.set_serial_on(side, serial);
    serves = serial;
  };
  publish(1);
  std::vector<ReaderSlot> slots;
  for (uint64_t process = 1; process <= kProcesses; ++process) {
    slots.push_back(slot_of(page, process));
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < kProcesses * kThreads; ++i) {
    threads.emplace_back([&, i] {
      ReaderSlot& slot = slots[static_cast<size_t>(i % kProcesses)];
      uint64_t own = serves;
      for (int batch = 0; !done; ++batch) {
        const std::optional<SidePin> pin = slot.pin(side_of(own), own);
        if (!pin) {
          ++refused;
          const uint64_t later = serves;
          early += later <= own;  // what is written to does not serve
          own = later;
          continue;
        }
        const std::vector<uint64_t>& of_side = rows[side_of(own)];
        torn += of_side.front() != own;
        // In the middle of a batch, and now and then between two.
        if (batch % 8 == 0) std::this_thread::yield();
        torn += std::count(of_side.begin(), of_side.end(), own) != kRows;
        ++read;
      }
    });
  }
  // On a busy machine the readers may run for the first time when many versions have served.
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  for (uint64_t serial = 2; serial <= kLeast || refused < kOften || read < kOften; ++serial) {
    publish(serial);
    if (std::chrono::steady_clock::now() > end) break;
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(torn == 0);
  CHECK(early == 0);
  CHECK(refused >= kOften);
  CHECK(read >= kOften);
  CHECK(page.holders(0).empty());
  CHECK(page.holders(1).empty());
}
