#include "channel/message.h"

namespace bls {

size_t measure(const Part& part) {
  size_t bytes = 0;
  for (const Block& block : part) {
    bytes += block.writer != nullptr ? block.writer->write(nullptr, 0) : block.bytes();
  }
  return bytes;
}

size_t copy_rows(std::byte* to, size_t room, const Block& block) {
  if (block.writer != nullptr) return block.writer->write(to, room);
  if (block.bytes() == 0 || block.bytes() > room) return block.bytes();
  const std::byte* from = block.data;
  for (size_t row = 0; row < block.rows; ++row, from += block.stride, to += block.row_bytes) {
    std::memcpy(to, from, block.row_bytes);
  }
  return block.bytes();
}

}  // namespace bls
