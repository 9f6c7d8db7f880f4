#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace bls {

/// Dtypes that native code reads numbers of, as bits of a set.
enum Dtype : uint32_t {
  kFloat32 = 1 << 0,
  kFloat64 = 1 << 1,
  kFloat16 = 1 << 2,
  kBfloat16 = 1 << 3,
  kInt32 = 1 << 4,
  kInt64 = 1 << 5,
  kUint8 = 1 << 6,
  kOtherDtype = 1 << 7,  ///< whose bytes can be moved
};
using Dtypes = uint32_t;
constexpr Dtypes kAnyDtype = (kOtherDtype << 1) - 1;

/// Dtypes as torch writes them: "torch.int32 or torch.int64".
std::string names_of(Dtypes dtypes);

/// Where the items of a tensor lie. The memory is the tensor's.
struct Strided {
  std::byte* data = nullptr;
  Dtype dtype = kOtherDtype;
  size_t item_bytes = 0;
  size_t items = 0;
  bool contiguous = false;
  int dimensions = 0;
  // Of a tensor with two dimensions, in items.
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 0;

  /// Whether each row is one run of memory, and apart from the others.
  bool has_whole_rows() const {
    return dimensions == 2 && (contiguous || ((columns == 1 || column_stride == 1) &&
                                              (rows == 1 || row_stride >= columns)));
  }
};

bool is_tensor(pybind11::handle object);

/// Reads a tensor in place; nothing where it has no memory on the CPU, and for other objects.
///
/// It is read through the C functions that torch.Tensor names for DLPack: tens of nanoseconds, and
/// no header of torch, where asking for its attributes takes a microsecond. torch has no tensors
/// that may not be written to.
std::optional<Strided> strided_of(pybind11::handle tensor);

}  // namespace bls
