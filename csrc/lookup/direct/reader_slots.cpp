#include "lookup/direct/reader_slots.h"

#include <stdexcept>
#include <string>

namespace bls {
namespace {

/// In the number of a process that fills its slot.
constexpr uint64_t kFilling = uint64_t{1} << 63;

// Acquire and release keep a serial between the stores that show and hide its process.
void store(std::atomic<uint64_t>& word, uint64_t value) {
  word.store(value, std::memory_order_release);
}
uint64_t load(const std::atomic<uint64_t>& word) { return word.load(std::memory_order_acquire); }

bool is_shown(uint64_t process) { return process != 0 && (process & kFilling) == 0; }

}  // namespace

std::vector<TableReader> ReaderSlots::readers() const {
  std::vector<TableReader> found;
  for (const Slot& slot : slots_) {
    for (uint64_t process = load(slot.process); is_shown(process);) {
      const uint64_t oldest = load(slot.oldest);
      const uint64_t after = load(slot.process);
      if (after == process) {
        found.push_back({process, oldest});
        break;
      }
      process = after;
    }
  }
  return found;
}

std::optional<uint32_t> ReaderSlots::take(const TableReader& reader, const IsAlive& is_alive) {
  if (!is_shown(reader.process)) {
    throw std::invalid_argument("no process has the number " + std::to_string(reader.process));
  }
  for (const bool from_the_dead : {false, true}) {  // to ask who is alive takes long
    for (uint32_t number = 0; number < kSlots; ++number) {
      Slot& slot = slots_[number];
      uint64_t found = load(slot.process);
      if (from_the_dead ? is_alive(found & ~kFilling) : found != 0) continue;
      if (!slot.process.compare_exchange_strong(found, reader.process | kFilling)) continue;
      store(slot.oldest, reader.oldest);
      for (std::atomic<uint64_t>& pins : slot.pins) store(pins, 0);  // a dead process's
      store(slot.process, reader.process);
      return number;
    }
  }
  return std::nullopt;
}

void ReaderSlots::tell(uint32_t slot, uint64_t oldest) { store(slots_.at(slot).oldest, oldest); }

void ReaderSlots::leave(uint32_t slot) { store(slots_.at(slot).process, 0); }

// Sequentially consistent, as are the stores and loads of a side's version on the control page. A
// reader counts up and then looks at the version, and the keeper takes the version away and then
// looks at the counts: one of the two sees the other.
void ReaderSlots::pin(uint32_t slot, uint32_t side) {
  slots_.at(slot).pins.at(side).fetch_add(1, std::memory_order_seq_cst);
}

void ReaderSlots::unpin(uint32_t slot, uint32_t side) {
  slots_.at(slot).pins.at(side).fetch_sub(1, std::memory_order_seq_cst);
}

std::vector<uint64_t> ReaderSlots::holders(uint32_t side) const {
  std::vector<uint64_t> found;
  for (const Slot& slot : slots_) {
    // The count before the process: whose count it is has been shown before it was counted up.
    if (slot.pins.at(side).load(std::memory_order_seq_cst) == 0) continue;
    const uint64_t process = load(slot.process);
    if (is_shown(process)) found.push_back(process);
  }
  return found;
}

}  // namespace bls
