#pragma once

#include <cstddef>

namespace bls {

inline constexpr size_t kCacheLine = 64;

/// How many rows are on their way while one is read. Rows that ids name lie anywhere in memory, and
/// short ones are read so fast that more of them have to be under way, see docs/design/forward.md.
[[gnu::always_inline]] constexpr size_t rows_ahead(size_t row_bytes, size_t bytes_ahead) {
  constexpr size_t kFewest = 16, kMost = 64;
  const size_t rows = row_bytes > 0 ? bytes_ahead / row_bytes : kMost;
  return rows < kFewest ? kFewest : rows > kMost ? kMost : rows;
}

[[gnu::always_inline]] inline void prefetch_row(const std::byte* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(row + at);
}

}  // namespace bls
