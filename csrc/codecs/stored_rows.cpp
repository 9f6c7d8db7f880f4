#include "codecs/stored_rows.h"

#include <stdexcept>

#include "codecs/kernels/kernels.h"

namespace bls::stored_rows {

size_t store_int8(const Matrix<const float>& rows, size_t row_bytes, std::byte* out) {
  if (rows.columns == 0 || row_bytes < kHeadBytes + rows.columns) {
    throw std::invalid_argument("stored rows without room for scale, shift and codes");
  }
  return kernels().store_int8(rows, row_bytes, out);
}

}  // namespace bls::stored_rows
