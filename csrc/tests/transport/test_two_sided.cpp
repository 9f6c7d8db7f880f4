// What the inbox of a two-sided transport makes of what it is told, and what the transport asks of
// its messenger. The tests of the protocol run over both as well: see transport_under_test.h.

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/ranks.h"
#include "transport/two_sided/two_sided_inbox.h"
#include "transport/two_sided/two_sided_transport.h"

using namespace bls;
using namespace bls::testing;

namespace {

const RingShape kShape{.rank = 0, .world_size = 3, .slots = 2, .slot_bytes = 64};
// Whoever waits as long has failed: the test hangs until its own deadline.
const Clock::time_point kNever = Clock::now() + std::chrono::hours(1);

struct alignas(64) Memory {
  std::byte bytes[6 * 64] = {};
};

std::optional<Failure> refusal_of(size_t slot_bytes) {
  return failure_of([&] {
    TwoSidedInbox(Slots{{.rank = 0, .world_size = 3, .slots = 2, .slot_bytes = slot_bytes}, {}});
  });
}

bool not_ready(void*) { return false; }

/// Notes what it is asked for, in words.
class NotingMessenger final : public Messenger {
 public:
  explicit NotingMessenger(std::vector<std::string>& notes) : notes_(notes) {}

  void exchange(uint32_t slot, uint64_t sequence, std::span<const size_t> bytes) override {
    note("exchange", slot, static_cast<int>(sequence));
    for (const size_t of_peer : bytes) notes_.back().append(" ").append(std::to_string(of_peer));
  }
  std::byte* expose(int destination, uint32_t, size_t bytes) override {
    note("expose", destination, static_cast<int>(bytes));
    return memory_.bytes;
  }
  void retract(int, uint32_t) override {}
  const std::byte* pull(int source, uint32_t, size_t bytes) override {
    note("pull", source, static_cast<int>(bytes));
    return memory_.bytes;
  }
  void drop(int, uint32_t) override {}
  void return_credit(int, uint64_t) override {}
  void ask(int peer) override { note("ask", peer); }
  void ask_for_end(int peer) override { note("ask for end", peer); }
  void spread_poison(int origin, const std::string& message) override {
    note("poison " + message, origin);
  }
  void close(uint64_t posted) override { note("close", static_cast<int>(posted)); }
  void leave() override {}

 private:
  template <class... Numbers>
  void note(std::string text, Numbers... numbers) {
    ((text.append(" ").append(std::to_string(numbers))), ...);
    notes_.push_back(text);
  }

  std::vector<std::string>& notes_;
  Memory memory_;
};

struct Noted {
  Memory inbox_memory;
  Memory outbox_memory;
  std::vector<std::string> notes;
  std::shared_ptr<TwoSidedInbox> inbox =
      std::make_shared<TwoSidedInbox>(Slots{kShape, inbox_memory.bytes});
  TwoSidedTransport transport{std::make_unique<NotingMessenger>(notes), inbox,
                              Slots{kShape, outbox_memory.bytes}};

  using Notes = std::vector<std::string>;
};

}  // namespace

TEST_CASE("a message arrives in the slot of its source and number") {
  Memory memory;
  TwoSidedInbox inbox({kShape, memory.bytes});
  for (const uint64_t sequence : {0, 1, 2}) inbox.arrived(1, sequence);
  inbox.arrived(2, 0);
  CHECK(arrival_word(inbox.slots().slot(1, 0)).load() == 3);
  CHECK(arrival_word(inbox.slots().slot(1, 1)).load() == 2);
  CHECK(arrival_word(inbox.slots().slot(2, 0)).load() == 1);
  CHECK(arrival_word(inbox.slots().slot(2, 1)).load() == 0);
}

TEST_CASE("a peer has closed only when everything that it posted is here") {
  Memory memory;
  TwoSidedInbox inbox({kShape, memory.bytes});
  inbox.closed(1, 2);
  inbox.lost(1, PeerState::kDead, "closed by peer");  // as connections end after a close
  CHECK(inbox.state_of(1) == PeerState::kDead);
  for (const uint64_t sequence : {0, 1}) inbox.arrived(2, sequence);
  inbox.arrived(1, 0);
  CHECK(inbox.state_of(1) == PeerState::kDead);
  inbox.arrived(1, 1);
  CHECK(inbox.state_of(1) == PeerState::kClosed);
  CHECK(inbox.state_of(2) == PeerState::kOpen);
}

TEST_CASE("a failed exchange is blamed on a lost peer, and on the network if none is told of") {
  Memory memory;
  TwoSidedInbox inbox({kShape, memory.bytes});
  inbox.failed("cannot send");
  inbox.failed("a consequence");
  CHECK(inbox.state_of(1) == PeerState::kOpen);  // it may still turn out which one
  inbox.lost(1, PeerState::kDead, "");
  CHECK(inbox.state_of(1) == PeerState::kDead);
  while (inbox.state_of(2) == PeerState::kOpen) std::this_thread::yield();
  CHECK(inbox.state_of(2) == PeerState::kFailed);
  CHECK(inbox.fault_of(2) == "cannot send");
  CHECK(inbox.fault_of(1) == "");
  CHECK(inbox.state_of(1) == PeerState::kDead);
}

TEST_CASE("of several poisons at once one is kept, and one teller knows that it is its own") {
  Memory memory;
  TwoSidedInbox inbox({kShape, memory.bytes});
  constexpr int kTellers = 8;
  std::vector<int> first(kTellers);
  std::vector<std::thread> tellers;
  for (int origin = 0; origin < kTellers; ++origin) {
    tellers.emplace_back([&, origin] {
      first[static_cast<size_t>(origin)] =
          inbox.poison(origin, std::string(100, static_cast<char>('a' + origin)));
    });
  }
  while (inbox.poisoned().load() == 0) std::this_thread::yield();
  const Poison kept = inbox.kept_poison();
  for (std::thread& teller : tellers) teller.join();
  CHECK(kept.message == std::string(100, static_cast<char>('a' + kept.origin)));
  CHECK(inbox.kept_poison().message == kept.message);
  for (int origin = 0; origin < kTellers; ++origin) {
    CHECK(first[static_cast<size_t>(origin)] == (origin == kept.origin));
  }
}

TEST_CASE("news between the question and the sleep end the sleep") {
  Memory memory;
  TwoSidedInbox inbox({kShape, memory.bytes});
  const auto told_meanwhile = [](void* context) {
    static_cast<TwoSidedInbox*>(context)->read(1, 7);
    return false;
  };
  inbox.sleep(told_meanwhile, &inbox, kNever);
  CHECK(inbox.read_by(1) == 7);
  const auto fails_meanwhile = [](void* context) {
    static_cast<TwoSidedInbox*>(context)->poison(1, "it failed");
    return false;
  };
  inbox.sleep(fails_meanwhile, &inbox, kNever);
  inbox.sleep(not_ready, nullptr, kNever);  // nobody who is poisoned sleeps
}

TEST_CASE("whatever a peer tells wakes the rank") {
  using Tell = std::function<void(TwoSidedInbox&)>;
  const Tell ways[] = {
      [](TwoSidedInbox& inbox) { inbox.arrived(1, 0); },
      [](TwoSidedInbox& inbox) { inbox.read(1, 1); },
      [](TwoSidedInbox& inbox) { inbox.closed(1, 1); },
      [](TwoSidedInbox& inbox) { inbox.lost(1, PeerState::kFailed, "unplugged"); },
      [](TwoSidedInbox& inbox) { inbox.failed("unplugged"); },
      [](TwoSidedInbox& inbox) { inbox.poison(1, "it failed"); },
      [](TwoSidedInbox& inbox) { inbox.wake(); },
  };
  for (const Tell& tell : ways) {
    Memory memory;
    TwoSidedInbox inbox({kShape, memory.bytes});
    std::atomic<bool> asked = false;
    std::thread teller([&] {
      while (!asked) std::this_thread::yield();
      tell(inbox);
    });
    const auto ask = [](void* context) {
      static_cast<std::atomic<bool>*>(context)->store(true);
      return false;
    };
    inbox.sleep(ask, &asked, kNever);
    teller.join();
  }
}

TEST_CASE("what a peer has posted is waited for until it is told") {
  Memory memory;
  TwoSidedInbox inbox({kShape, memory.bytes});
  CHECK_FALSE(inbox.has_posted(1, 4, Clock::now()));
  std::thread teller([&] {
    inbox.posted(1, 4);
    inbox.posted(1, 5);
  });
  CHECK(inbox.has_posted(1, 4, kNever));
  CHECK_FALSE(inbox.has_posted(1, 5, Clock::now()));
  teller.join();
}

TEST_CASE("a round leaves with its last message, and the close says how many did") {
  Noted noted;
  noted.transport.deliver(1, noted.transport.outbox(1, 1), 64, 5);
  CHECK(noted.notes.empty());
  noted.transport.deliver(2, noted.transport.outbox(2, 1), 40, 5);
  noted.transport.announce_close();
  CHECK(noted.notes == Noted::Notes{"exchange 1 5 0 64 40", "close 6"});
}

TEST_CASE("peers are asked once for each message that is missing") {
  Noted noted;
  noted.inbox->posted(1, 8);
  noted.inbox->posted(2, 9);
  CHECK(noted.transport.on_its_way(1, 7));
  CHECK(noted.transport.on_its_way(2, 7));
  CHECK(noted.notes == Noted::Notes{"ask 1", "ask 2"});
  CHECK_FALSE(noted.transport.on_its_way(1, 8));
  CHECK(noted.transport.on_its_way(2, 8));
  CHECK(noted.notes == Noted::Notes{"ask 1", "ask 2", "ask 1", "ask 2"});
}

TEST_CASE("the poison that is kept is spread, once") {
  Noted noted;
  noted.transport.pass_poison_on();
  CHECK(noted.notes.empty());
  noted.inbox->poison(2, "the lookup failed");
  noted.transport.poison_all("a consequence");
  noted.transport.pass_poison_on();
  CHECK(noted.notes == Noted::Notes{"poison the lookup failed 2"});
}

TEST_CASE("no memory is taken for a large message of another size than its parts have") {
  Noted noted;
  MemoryAddress address;
  noted.transport.expose(1, 0, 100, address);
  CHECK(address.bytes == 100);
  CHECK_NOTHROW(noted.transport.pull(1, 0, address, 100));
  for (const uint64_t announced : {uint64_t{99}, uint64_t{101}, uint64_t{1} << 45}) {
    address.bytes = announced;
    const auto failure = failure_of([&] { noted.transport.pull(1, 0, address, 100); });
    REQUIRE(failure);
    CHECK(failure->kind == ErrorKind::kProtocol);
    CHECK(failure->message ==
          "its parts take 100 bytes, and it announces " + std::to_string(announced));
  }
  CHECK(noted.notes == Noted::Notes{"expose 1 100", "pull 1 100"});
}

TEST_CASE("slots whose bytes cannot be counted are refused") {
  const auto failure = refusal_of(size_t{1} << 62);
  REQUIRE(failure);
  CHECK(!failure->kind);  // a caller's mistake
  CHECK(failure->message.find("slot_bytes is 4611686018427387904") == 0);
}
