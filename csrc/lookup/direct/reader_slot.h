#pragma once

#include <cstdint>
#include <optional>

#include "lookup/direct/control_page.h"
#include "lookup/direct/reader_slots.h"

namespace bls {

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

 private:
  ReaderSlot(ControlPage* page, uint32_t number) : page_(page), number_(number) {}

  ControlPage* page_;
  uint32_t number_;
};

}  // namespace bls
