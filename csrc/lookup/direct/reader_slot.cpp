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

}  // namespace bls
