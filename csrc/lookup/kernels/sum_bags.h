#pragma once

#include <cstddef>

namespace bls {

/// Bags of rows of floats, of one table unless ids are addresses, one behind the other: the ids of
/// bag b are `starts[b]` to `starts[b + 1]` of `ids`.
struct Bags {
  const std::byte* table = nullptr;
  size_t row_bytes = 0;
  const std::byte* ids = nullptr;  ///< each of which the table has
  size_t id_bytes = 8;             ///< 4 or 8
  const float* weights = nullptr;  ///< one of each id, or null for none
  const size_t* starts = nullptr;  ///< [count + 1]
  size_t count = 0;
  bool means = false;              ///< sums times the inverse of the number of ids
  bool ids_are_addresses = false;  ///< of rows, wherever these lie; `table` is not read then
};

/// Writes the sum of bag b to `to + b * stride`: from zero, row after row in the order of the ids,
/// each fused with its weight. FBGEMM's CPU kernels have the same bits.
void sum_bags(const Bags& bags, std::byte* to, size_t stride);

// For one instruction set each.
void sum_bags_portable(const Bags& bags, std::byte* to, size_t stride);
void sum_bags_avx2(const Bags& bags, std::byte* to, size_t stride);
void sum_bags_avx512(const Bags& bags, std::byte* to, size_t stride);

}  // namespace bls
