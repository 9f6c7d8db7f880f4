#include "channel/block.h"

namespace bls {

std::byte* copy_rows(std::byte* to, const Block& block) {
  if (block.writer != nullptr) {
    block.writer->write(to);
    return to + block.bytes();
  }
  const std::byte* from = block.data;
  for (size_t row = 0; row < block.rows; ++row, from += block.stride, to += block.row_bytes) {
    std::memcpy(to, from, block.row_bytes);
  }
  return to;
}

}  // namespace bls
