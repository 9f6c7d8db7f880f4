#include "codecs/rowwise.h"

#include <stdexcept>
#include <string>

#include "codecs/kernels/kernels.h"
#include "errors.h"

namespace bls::rowwise {
namespace {

void check_bits(int bits) {
  if (bits == 8 || bits == 4 || bits == 2) return;
  throw std::invalid_argument("rows can be quantized to 8, 4 or 2 bits, not to " +
                              std::to_string(bits));
}

[[noreturn]] void refuse(const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol, "quantized rows " + what);
}

}  // namespace

size_t bytes_without_escapes(int bits, size_t rows, size_t columns) {
  check_bits(bits);
  return columns == 0 ? 0 : rows * (kHeadBytes + code_bytes(bits, columns));
}

size_t max_bytes(int bits, size_t rows, size_t columns) {
  return bytes_without_escapes(bits, rows, columns) + rows * columns * sizeof(float);
}

size_t encode(int bits, const Matrix<const float>& rows, std::span<std::byte> out) {
  const size_t needed = bytes_without_escapes(bits, rows.rows, rows.columns);
  if (needed == 0) return 0;
  if (needed <= out.size()) {
    return kernels().encode_rowwise(bits, rows, out.data(), out.data() + out.size());
  }
  return needed + kernels().count_escaped(rows) * rows.columns * sizeof(float);
}

size_t decode(int bits, std::span<const std::byte> in, const Matrix<float>& rows) {
  const size_t needed = bytes_without_escapes(bits, rows.rows, rows.columns);
  if (in.size() < needed) {
    refuse("have " + std::to_string(in.size()) + " bytes and need " + std::to_string(needed));
  }
  if (needed == 0) return 0;
  const std::byte* const end =
      kernels().decode_rowwise(bits, in.data(), in.data() + in.size(), rows);
  if (end == nullptr) refuse("lack the values of an escaped row");
  return static_cast<size_t>(end - in.data());
}

}  // namespace bls::rowwise
