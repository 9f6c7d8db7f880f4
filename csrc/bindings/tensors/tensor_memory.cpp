#include "bindings/tensors/tensor_memory.h"

#include <string>

#include "bindings/tensors/strided.h"

namespace py = pybind11;

namespace bls {
namespace {

[[noreturn]] void refuse_memory(py::handle tensor) {
  if (!is_tensor(tensor)) {
    throw py::type_error("only tensors can be posted, and no " +
                         std::string(Py_TYPE(tensor.ptr())->tp_name));
  }
  if (!tensor.attr("is_cpu").cast<bool>()) {
    throw py::value_error("a tensor is on " + std::string(py::str(tensor.attr("device"))) +
                          ", but only CPU tensors can be posted");
  }
  throw py::value_error("a " + std::string(Py_TYPE(tensor.ptr())->tp_name) + " of layout " +
                        std::string(py::str(tensor.attr("layout"))) +
                        " has no memory that can be posted: post a dense one with values");
}

}  // namespace

Block memory_of(py::handle tensor) {
  const std::optional<Strided> found = strided_of(tensor);
  if (!found) refuse_memory(tensor);
  if (found->contiguous) return {found->data, found->items * found->item_bytes};
  if (!found->has_whole_rows()) {
    throw py::value_error("a tensor of shape " + std::string(py::str(tensor.attr("shape"))) +
                          " has strides " + std::string(py::str(tensor.attr("stride")())) +
                          ": post contiguous tensors or 2-D ones with contiguous rows");
  }
  return {found->data, static_cast<size_t>(found->columns) * found->item_bytes,
          static_cast<size_t>(found->rows),
          static_cast<size_t>(found->row_stride) * found->item_bytes};
}

}  // namespace bls
