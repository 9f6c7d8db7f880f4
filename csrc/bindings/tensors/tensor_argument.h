#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

#include "bindings/tensors/strided.h"

namespace bls {

/// An argument of a bound function that is to be a torch.Tensor. The functions below check it: a
/// bound function takes any object, so that what is wrong can be said of the argument by its name.
class Tensor : public pybind11::object {
  static bool is_any(PyObject*) { return true; }

 public:
  PYBIND11_OBJECT_DEFAULT(Tensor, object, is_any)
};

/// Items one behind the other.
struct TensorItems {
  std::byte* data = nullptr;
  size_t count = 0;
  size_t item_bytes = 0;
  Dtype dtype = kOtherDtype;

  size_t bytes() const { return count * item_bytes; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

/// Rows that are one run of memory each.
struct TensorRows {
  std::byte* data = nullptr;
  size_t rows = 0, columns = 0;
  size_t stride = 0;  ///< from one row to the next, in items
  size_t item_bytes = 0;
  Dtype dtype = kOtherDtype;

  size_t row_bytes() const { return columns * item_bytes; }
  size_t stride_bytes() const { return stride * item_bytes; }
  size_t bytes() const { return rows * row_bytes(); }  ///< where they lie one behind the other
  std::byte* row(size_t index) const { return data + index * stride_bytes(); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

// Each throws py::type_error for what is no tensor, and py::value_error for another device, dtype,
// number of dimensions or order in memory. They name the argument, what it is and what it must be.

/// A contiguous tensor of any number of dimensions.
TensorItems items_of(const Tensor& tensor, const char* name, Dtypes dtypes);
/// A contiguous tensor with two dimensions.
TensorRows rows_of(const Tensor& tensor, const char* name, Dtypes dtypes);
/// A tensor with two dimensions whose rows may be apart, as some columns of another one are.
TensorRows rows_apart_of(const Tensor& tensor, const char* name, Dtypes dtypes);

/// Throws py::value_error unless an argument has as many `things` as there must be.
void check_count(const char* name, size_t has, size_t must_be, const char* things);
/// The same for the rows of a matrix. Rows without columns take no memory, however many there are.
void check_rows(const char* name, const TensorRows& rows, size_t must_be);
/// Throws py::value_error where something of an argument ends behind its last one.
void check_end(const char* name, size_t has, size_t first, size_t count, const char* things);

}  // namespace bls

template <>
struct pybind11::detail::handle_type_name<bls::Tensor> {
  static constexpr auto name = const_name("torch.Tensor");
};
