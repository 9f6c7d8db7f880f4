#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace bls {

/// A process that reads tables.
struct TableReader {
  uint64_t process = 0;  ///< a number that tells it from all other processes; 0: nobody
  uint64_t oldest = 0;   ///< serial of the oldest version that it still has mapped
};

/// The processes that read the tables of a model: shared memory, zeroed at first, that all of them
/// map. Each has a slot, and is the only one that writes to it. A dead process's slot is free.
///
/// A slot is a cache line, so that no process slows another one down. It is filled before it shows
/// its process: whoever sees a process sees a serial of that process. One that dies while it fills
/// its slot was never seen.
///
/// Tables that are refreshed by row have two copies, on two sides. A slot also counts which of them
/// its process reads at the moment: see SidePin.
class ReaderSlots {
 public:
  static constexpr uint32_t kSlots = 256;
  static constexpr uint32_t kSides = 2;

  /// Says of a process whether it is alive.
  using IsAlive = std::function<bool(uint64_t process)>;

  /// Those that have a slot, and may be dead.
  std::vector<TableReader> readers() const;

  /// Takes a slot that is free, or the one of a dead process; nothing if there is neither. Throws
  /// what `is_alive` throws, with nothing taken, and std::invalid_argument for a number that is no
  /// process's.
  std::optional<uint32_t> take(const TableReader& reader, const IsAlive& is_alive);

  /// For the process of a slot.
  void tell(uint32_t slot, uint64_t oldest);
  void leave(uint32_t slot);
  /// Any thread of the process of a slot counts its pins of a side.
  void pin(uint32_t slot, uint32_t side);
  void unpin(uint32_t slot, uint32_t side);

  /// The processes that have pinned a side, and may be dead. One without a process in its slot is:
  /// what it left there goes when another one takes the slot.
  std::vector<uint64_t> holders(uint32_t side) const;

 private:
  struct alignas(64) Slot {
    std::atomic<uint64_t> process;
    std::atomic<uint64_t> oldest;
    std::array<std::atomic<uint64_t>, kSides> pins;
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock of one process is no other's");

  std::array<Slot, kSlots> slots_;
};
static_assert(sizeof(ReaderSlots) == size_t{64} * ReaderSlots::kSlots);

}  // namespace bls
