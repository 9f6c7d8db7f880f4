#pragma once

#include <cstddef>

namespace bls {

/// Rows of floats of some samples: of each a first one, and `others`.
struct Rows {
  const float* first = nullptr;   ///< [samples, columns]
  const float* others = nullptr;  ///< [samples, count, columns]
  size_t samples = 0, count = 0, columns = 0;
};

/// Writes to `to`, [samples, columns + pairs], the first row of each sample and the dot product of
/// each pair of its rows: of the first one with those behind it, of the second one, and so on.
/// Products are fused with sums, column after column.
void dot_products(const Rows& rows, float* to);

/// Floats of scratch that the following take.
size_t dot_products_scratch(const Rows& rows);

// For one instruction set each. `scratch` begins with a cache line.
void dot_products_portable(const Rows& rows, float* scratch, float* to);
void dot_products_avx2(const Rows& rows, float* scratch, float* to);
void dot_products_avx512(const Rows& rows, float* scratch, float* to);

}  // namespace bls
