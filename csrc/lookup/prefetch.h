#pragma once

#include <cstddef>

namespace bls {

/// Rows that ids name lie anywhere in memory. This many are on their way while one is read: fewer
/// do not cover the latency, more than the core can have outstanding help nothing.
inline constexpr size_t kRowsAhead = 8;

[[gnu::always_inline]] inline void prefetch_row(const std::byte* row, size_t bytes) {
  constexpr size_t kCacheLine = 64;
  for (size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(row + at);
}

}  // namespace bls
