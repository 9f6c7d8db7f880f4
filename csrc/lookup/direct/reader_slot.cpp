#include "lookup/direct/reader_slot.h"

#include <utility>

namespace bls {

std::optional<ReaderSlot> ReaderSlot::take(ControlPage& page, const TableReader& reader,
                                           const ReaderSlots::IsAlive& is_alive) {
  const std::optional<uint32_t> number = page.reader_slots().take(reader, is_alive);
  if (!number) return std::nullopt;
  return ReaderSlot(&page, *number);
}

ReaderSlot::ReaderSlot(ReaderSlot&& other) noexcept
    : page_(std::exchange(other.page_, nullptr)), number_(other.number_) {}

ReaderSlot::~ReaderSlot() {
  if (page_ != nullptr && page_->is_writable()) page_->reader_slots().leave(number_);
}

void ReaderSlot::tell(uint64_t oldest) { page_->reader_slots().tell(number_, oldest); }

std::optional<SidePin> ReaderSlot::pin(uint32_t side, uint64_t serial) {
  std::optional<SidePin> pin(std::in_place, *page_, number_, side);
  const uint64_t found = page_->serial_on(side);
  if (found == 0 || found != serial) pin.reset();
  return pin;
}

SidePin::SidePin(ControlPage& page, uint32_t slot, uint32_t side)
    : page_(&page), slot_(slot), side_(side) {
  page.reader_slots().pin(slot, side);
}

SidePin::SidePin(SidePin&& other) noexcept
    : page_(std::exchange(other.page_, nullptr)), slot_(other.slot_), side_(other.side_) {}

SidePin::~SidePin() {
  if (page_ != nullptr && page_->is_writable()) page_->reader_slots().unpin(slot_, side_);
}

}  // namespace bls
