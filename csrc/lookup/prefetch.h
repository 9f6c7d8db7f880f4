#pragma once

#include <cstddef>

namespace bls {

inline constexpr size_t kCacheLine = 64;

/// Rows that ids name lie anywhere in memory. This many are on their way while one is read: over
/// rows of 64 to 512 bytes no number was better.
inline constexpr size_t kRowsAhead = 16;

[[gnu::always_inline]] inline void prefetch_row(const std::byte* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(row + at);
}

}  // namespace bls
