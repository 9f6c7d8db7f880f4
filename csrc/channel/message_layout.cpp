#include "channel/message_layout.h"

namespace bls {
namespace {

/// What the blocks of a part take.
size_t measure(const Part& part) {
  size_t bytes = 0;
  for (const Block& block : part) {
    bytes += block.writer != nullptr ? block.writer->write(nullptr, 0) : block.bytes();
  }
  return bytes;
}

/// Copies rows that do not lie one behind the other, or has them made, if `room` bytes are enough.
/// Returns how many they take.
size_t copy_rows(std::byte* to, size_t room, const Block& block) {
  if (block.writer != nullptr) return block.writer->write(to, room);
  if (block.bytes() == 0 || block.bytes() > room) return block.bytes();
  const std::byte* from = block.data;
  for (size_t row = 0; row < block.rows; ++row, from += block.stride, to += block.row_bytes) {
    std::memcpy(to, from, block.row_bytes);
  }
  return block.bytes();
}

}  // namespace

size_t copy_blocks(std::byte* to, size_t room, const Part& part) {
  if (bytes_of(part) > room) return SIZE_MAX;
  size_t at = 0;
  for (const Block& block : part) {
    size_t bytes = block.bytes();
    if (bytes > room - at) return SIZE_MAX;
    if (!block.contiguous()) {
      bytes = copy_rows(to + at, room - at, block);
      if (bytes > room - at) return SIZE_MAX;
    } else if (bytes != 0) {
      copy_bytes(to + at, block.data, bytes);
    }
    at += bytes;
  }
  return at;
}

size_t put_part(std::byte* base, size_t& at, size_t end, const Part& part) {
  const size_t first = align_part(at, bytes_of(part));
  if (first > end) return SIZE_MAX;
  const size_t bytes = copy_blocks(base + first, end - first, part);
  if (bytes > end - first) return SIZE_MAX;
  const size_t start = align_part(at, bytes);
  if (start != first) [[unlikely]] {  // its writer has made a cache line of it
    if (start + bytes > end) return SIZE_MAX;
    std::memmove(base + start, base + first, bytes);
  }
  at = start;
  return bytes;
}

bool put_parts(std::byte* base, size_t end, const Message& message, PartLayout& layout) {
  layout.count = message.size();
  size_t at = 0;
  for (size_t i = 0; i < layout.count; ++i) {
    layout.bytes[i] = put_part(base, at, end, message[i]);
    if (layout.bytes[i] == SIZE_MAX) return false;
    layout.offset[i] = at;
    at += layout.bytes[i];
  }
  layout.end = at;
  return true;
}

PartLayout layout_of(const Message& message, uint64_t start) {
  PartLayout layout;
  layout.count = message.size();
  for (size_t i = 0; i < layout.count; ++i) layout.bytes[i] = measure(message[i]);
  layout.place(start);
  return layout;
}

void put_measured(std::byte* base, size_t bytes, const Message& message, PartLayout& layout) {
  if (!put_parts(base, bytes, message, layout)) {
    throw std::logic_error("a part takes more bytes than it was measured to");
  }
}

}  // namespace bls
