#include "bindings/tensors/tensor_memory.h"

#include <pybind11/gil_safe_call_once.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/tensors/dlpack.h"

namespace py = pybind11;

namespace bls {
namespace {

/// What torch says of its tensors.
struct Torch {
  PyTypeObject* tensor;
  PyTypeObject* parameter;
  const dlpack::DLPackExchangeAPI* dlpack;  ///< null: only its attributes say
};

Torch find_torch() {
  const py::module_ module = py::module_::import("torch");
  const py::object tensor = module.attr("Tensor");
  Torch torch{reinterpret_cast<PyTypeObject*>(tensor.ptr()),
              reinterpret_cast<PyTypeObject*>(module.attr("nn").attr("Parameter").ptr()), nullptr};
  const py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
  if (!capsule.is_none()) {
    const auto* api = static_cast<const dlpack::DLPackExchangeAPI*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) throw py::error_already_set();
    if (api->header.version.major == dlpack::kMajorVersion &&
        api->dltensor_from_py_object_no_sync != nullptr) {
      torch.dlpack = api;
    }
  }
  return torch;  // types and functions live as long as the process
}

/// `stride` is between rows, in items.
Block rows_of(void* data, int64_t rows, int64_t columns, int64_t stride, size_t item_bytes) {
  return {static_cast<const std::byte*>(data), static_cast<size_t>(columns) * item_bytes,
          static_cast<size_t>(rows), static_cast<size_t>(stride) * item_bytes};
}

bool is_contiguous(const dlpack::DLTensor& tensor) {
  int64_t items = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != items) return false;
    items *= tensor.shape[i];
  }
  return true;
}

/// Sets `block` for a tensor whose memory it can be.
bool read(const dlpack::DLTensor& tensor, Block& block) {
  if (tensor.device.device_type != dlpack::kDLCPU) return false;
  const size_t item_bytes = size_t{tensor.dtype.bits} * tensor.dtype.lanes / 8;
  auto* const data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  int64_t items = 1;
  for (int i = 0; i < tensor.ndim; ++i) items *= tensor.shape[i];
  if (tensor.data == nullptr && items > 0) return false;  // a tensor of torch's that has no storage
  if (items == 0 || is_contiguous(tensor)) {
    block = rows_of(data, 1, items, 0, item_bytes);
    return true;
  }
  if (tensor.ndim != 2 || tensor.strides[1] != 1 || tensor.strides[0] < tensor.shape[1]) {
    return false;
  }
  block = rows_of(data, tensor.shape[0], tensor.shape[1], tensor.strides[0], item_bytes);
  return true;
}

/// For dtypes that DLPack has no code for, and to say what is wrong with a tensor.
Block read_attributes(py::handle tensor) {
  if (!tensor.attr("is_cpu").cast<bool>()) {
    throw py::value_error("a tensor is on " + std::string(py::str(tensor.attr("device"))) +
                          ", but only CPU tensors can be posted");
  }
  std::byte* data = nullptr;
  try {
    data = pointer(tensor.attr("data_ptr")().cast<uintptr_t>());
  } catch (const py::error_already_set&) {  // sparse, for instance
  }
  const auto items = tensor.attr("numel")().cast<int64_t>();
  const auto item_bytes = tensor.attr("element_size")().cast<size_t>();
  if (data == nullptr && items > 0) {
    throw py::value_error("a " + std::string(Py_TYPE(tensor.ptr())->tp_name) + " of layout " +
                          std::string(py::str(tensor.attr("layout"))) +
                          " has no memory that can be posted: post a dense one with values");
  }
  if (tensor.attr("is_contiguous")().cast<bool>()) {
    return rows_of(data, 1, items, 0, item_bytes);
  }
  const auto shape = tensor.attr("shape").cast<py::tuple>();
  const auto strides = tensor.attr("stride")().cast<py::tuple>();
  if (shape.size() == 2 && strides[1].cast<int64_t>() == 1) {
    const auto columns = shape[1].cast<int64_t>();
    const auto stride = strides[0].cast<int64_t>();
    if (stride >= columns) {
      return rows_of(data, shape[0].cast<int64_t>(), columns, stride, item_bytes);
    }
  }
  throw py::value_error("a tensor of shape " + std::string(py::str(shape)) + " has strides " +
                        std::string(py::str(strides)) +
                        ": post contiguous tensors or 2-D ones with contiguous rows");
}

}  // namespace

Block memory_of(py::handle tensor) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> found_torch;
  const Torch& torch = found_torch.call_once_and_store_result(&find_torch).get_stored();
  PyTypeObject* const type = Py_TYPE(tensor.ptr());
  // Of other classes derived from Tensor nobody knows what lies where.
  if (torch.dlpack != nullptr && (type == torch.tensor || type == torch.parameter)) {
    dlpack::DLTensor found;
    Block block;
    if (torch.dlpack->dltensor_from_py_object_no_sync(tensor.ptr(), &found) != 0) {
      PyErr_Clear();
    } else if (read(found, block)) {
      return block;
    }
  } else if (!PyType_IsSubtype(type, torch.tensor)) {
    throw py::type_error("only tensors can be posted, and no " + std::string(type->tp_name));
  }
  return read_attributes(tensor);
}

}  // namespace bls
