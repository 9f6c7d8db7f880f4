#pragma once

#include <cstddef>

namespace bls {

/// Rows of floats that may lie among others: a table's columns in a [batch, sum of dims] tensor.
template <typename T>
struct Matrix {
  T* data;
  size_t rows;
  size_t columns;
  size_t stride;  ///< from one row to the next, in items

  T* row(size_t index) const { return data + index * stride; }
};

}  // namespace bls
