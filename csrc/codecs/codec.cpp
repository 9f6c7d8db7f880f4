#include "codecs/codec.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "codecs/kernels/kernels.h"
#include "codecs/rowwise.h"
#include "errors.h"

namespace bls {
namespace {

/// Bits of a code, or 0 for codecs that do not quantize.
int code_bits(Codec codec) {
  switch (codec) {
    case Codec::kUint8:
      return 8;
    case Codec::kUint4:
      return 4;
    case Codec::kUint2:
      return 2;
    case Codec::kErrorBounded:
      throw std::invalid_argument(
          "error-bounded rows need a bound, which only a frame's table has");
    default:
      return 0;
  }
}

size_t value_bytes(Codec codec) { return codec == Codec::kFloat32 ? 4 : 2; }

void encode_row(Codec codec, const float* row, size_t columns, std::byte* out) {
  if (codec == Codec::kFloat32) {
    std::memcpy(out, row, columns * sizeof(float));
  } else if (codec == Codec::kFloat16) {
    kernels().to_float16(row, columns, out);
  } else {
    kernels().to_bfloat16(row, columns, out);
  }
}

void decode_row(Codec codec, const std::byte* in, float* row, size_t columns) {
  if (codec == Codec::kFloat32) {
    std::memcpy(row, in, columns * sizeof(float));
  } else if (codec == Codec::kFloat16) {
    kernels().from_float16(in, columns, row);
  } else {
    kernels().from_bfloat16(in, columns, row);
  }
}

}  // namespace

size_t usual_bytes(Codec codec, size_t rows, size_t columns) {
  if (const int bits = code_bits(codec)) return rowwise::bytes_without_escapes(bits, rows, columns);
  return rows * columns * value_bytes(codec);
}

size_t max_bytes(Codec codec, size_t rows, size_t columns) {
  if (const int bits = code_bits(codec)) return rowwise::max_bytes(bits, rows, columns);
  return rows * columns * value_bytes(codec);
}

size_t encode(Codec codec, const Matrix<const float>& rows, std::span<std::byte> out) {
  if (const int bits = code_bits(codec)) return rowwise::encode(bits, rows, out);
  const size_t row_bytes = rows.columns * value_bytes(codec);
  const size_t bytes = rows.rows * row_bytes;
  if (bytes == 0 || bytes > out.size()) return bytes;
  for (size_t row = 0; row < rows.rows; ++row) {
    encode_row(codec, rows.row(row), rows.columns, out.data() + row * row_bytes);
  }
  return bytes;
}

size_t decode(Codec codec, std::span<const std::byte> in, const Matrix<float>& rows) {
  if (const int bits = code_bits(codec)) return rowwise::decode(bits, in, rows);
  const size_t row_bytes = rows.columns * value_bytes(codec);
  const size_t bytes = rows.rows * row_bytes;
  if (in.size() < bytes) {
    throw ChannelError(ErrorKind::kProtocol, "rows have " + std::to_string(in.size()) +
                                                 " bytes and need " + std::to_string(bytes));
  }
  if (bytes == 0) return 0;  // nowhere to be read from, perhaps
  for (size_t row = 0; row < rows.rows; ++row) {
    decode_row(codec, in.data() + row * row_bytes, rows.row(row), rows.columns);
  }
  return bytes;
}

}  // namespace bls
