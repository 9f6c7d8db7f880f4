#pragma once

#include <cstddef>
#include <cstdint>

namespace bls {

/// Bags of rows of floats, one behind the other: the rows of bag b are `starts[b]` to
/// `starts[b + 1]`. Each row belongs to a part of its bag.
struct PartedBags {
  const std::byte* const* rows = nullptr;
  const uint32_t* parts = nullptr;  ///< of each row, below `part_count`
  size_t part_count = 1;
  size_t row_bytes = 0;
  const float* weights = nullptr;  ///< one of each row, or null for none
  const size_t* starts = nullptr;  ///< [count + 1]
  size_t count = 0;
  std::byte* sums = nullptr;  ///< memory for a sum of each part, [part_count x row_bytes]
};

/// Writes the sum of bag b to `to + b * stride`: each part from zero, row after row as `sum_bags`
/// does, and then the parts' sums in order, of parts without a row as well.
void sum_parts(const PartedBags& bags, std::byte* to, size_t stride);

// For one instruction set each.
void sum_parts_portable(const PartedBags& bags, std::byte* to, size_t stride);
void sum_parts_avx2(const PartedBags& bags, std::byte* to, size_t stride);
void sum_parts_avx512(const PartedBags& bags, std::byte* to, size_t stride);

}  // namespace bls
