#include "channel/block.h"

namespace bls {
namespace {

constexpr size_t kCacheLine = 64;
// Rows that ids name lie anywhere in memory. This many are on their way while one is copied: fewer
// do not cover the latency, more than the core can have outstanding help nothing.
constexpr size_t kRowsAhead = 8;

void prefetch(const std::byte* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(row + at);
}

/// With the size known to the compiler, a row's copy is a few vector moves instead of a call.
template <size_t kBytes>
void copy_row(std::byte* to, const std::byte* from, size_t bytes) {
  std::memcpy(to, from, kBytes == 0 ? bytes : kBytes);
}

template <class Id, size_t kBytes>
void gather(std::byte* to, const Block& block) {
  const size_t bytes = block.row_bytes;
  const auto row = [&block](size_t i) {
    Id id;
    std::memcpy(&id, block.ids + i * sizeof(Id), sizeof(id));
    return block.data + static_cast<size_t>(id) * block.stride;
  };
  const size_t lead = block.rows < kRowsAhead ? block.rows : kRowsAhead;
  for (size_t i = 0; i < lead; ++i) prefetch(row(i), bytes);
  for (size_t i = 0; i < block.rows; ++i, to += bytes) {
    if (i + kRowsAhead < block.rows) prefetch(row(i + kRowsAhead), bytes);
    copy_row<kBytes>(to, row(i), bytes);
  }
}

template <class Id>
void gather_any(std::byte* to, const Block& block) {
  switch (block.row_bytes) {
    case 64:
      return gather<Id, 64>(to, block);
    case 128:
      return gather<Id, 128>(to, block);
    case 256:
      return gather<Id, 256>(to, block);
    case 512:
      return gather<Id, 512>(to, block);
    default:
      return gather<Id, 0>(to, block);
  }
}

}  // namespace

std::byte* copy_rows(std::byte* to, const Block& block) {
  if (block.ids != nullptr) {
    block.id_bytes == 4 ? gather_any<int32_t>(to, block) : gather_any<int64_t>(to, block);
    return to + block.bytes();
  }
  const std::byte* from = block.data;
  for (size_t row = 0; row < block.rows; ++row, from += block.stride, to += block.row_bytes) {
    std::memcpy(to, from, block.row_bytes);
  }
  return to;
}

}  // namespace bls
