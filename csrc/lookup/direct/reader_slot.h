#pragma once

#include <cstdint>
#include <optional>

#include "lookup/direct/control_page.h"
#include "lookup/direct/reader_slots.h"

namespace bls {

/// A pin of a side by this process: while it exists, the keeper of the tables does not write there.
/// The page has to outlive it, and so has the slot. A forked child's copy takes nothing back.
class SidePin {
 public:
  SidePin(ControlPage& page, uint32_t slot, uint32_t side);
  SidePin(SidePin&& other) noexcept;
  SidePin& operator=(SidePin&&) = delete;
  ~SidePin();

 private:
  ControlPage* page_;
  uint32_t slot_;
  uint32_t side_;
};

/// A slot of this process on a control page, which has to outlive it. It is given back at the end.
/// A forked child has none: its copy of this object gives nothing back.
class ReaderSlot {
 public:
  /// Nothing if living processes have all slots. Throws as ReaderSlots::take, and
  /// std::invalid_argument in a forked child, which maps the page anew for a slot of its own.
  static std::optional<ReaderSlot> take(ControlPage& page, const TableReader& reader,
                                        const ReaderSlots::IsAlive& is_alive);

  ReaderSlot(ReaderSlot&& other) noexcept;
  ReaderSlot& operator=(ReaderSlot&&) = delete;
  ~ReaderSlot();

  /// Says which version is the oldest one that this process has mapped. Throws
  /// std::invalid_argument in a forked child.
  void tell(uint64_t oldest);

  /// Pins a side that has a version. Nothing if the side has another one by now, or none: then a
  /// later one serves. Any thread may call it. Throws std::invalid_argument in a forked child.
  std::optional<SidePin> pin(uint32_t side, uint64_t serial);

 private:
  ReaderSlot(ControlPage* page, uint32_t number) : page_(page), number_(number) {}

  ControlPage* page_;
  uint32_t number_;
};

}  // namespace bls
