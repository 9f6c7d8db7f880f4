#include "bindings/tensors/strided.h"

#include <pybind11/gil_safe_call_once.h>

#include <array>
#include <string>
#include <utility>

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

const Torch& torch_of_process() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> found;
  return found.call_once_and_store_result(&find_torch).get_stored();
}

constexpr std::array<std::pair<Dtype, const char*>, 8> kNames = {{
    {kFloat32, "torch.float32"},
    {kFloat64, "torch.float64"},
    {kFloat16, "torch.float16"},
    {kBfloat16, "torch.bfloat16"},
    {kInt32, "torch.int32"},
    {kInt64, "torch.int64"},
    {kUint8, "torch.uint8"},
    {kOtherDtype, "another dtype"},
}};

Dtype dtype_of(const dlpack::DLDataType& type) {
  if (type.lanes != 1) return kOtherDtype;
  switch (type.code << 8 | type.bits) {
    case dlpack::kDLFloat << 8 | 32:
      return kFloat32;
    case dlpack::kDLFloat << 8 | 64:
      return kFloat64;
    case dlpack::kDLFloat << 8 | 16:
      return kFloat16;
    case dlpack::kDLBfloat << 8 | 16:
      return kBfloat16;
    case dlpack::kDLInt << 8 | 32:
      return kInt32;
    case dlpack::kDLInt << 8 | 64:
      return kInt64;
    case dlpack::kDLUInt << 8 | 8:
      return kUint8;
    default:
      return kOtherDtype;
  }
}

bool is_contiguous(const dlpack::DLTensor& tensor) {
  int64_t items = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != items) return false;
    items *= tensor.shape[i];
  }
  return true;
}

std::optional<Strided> read(const dlpack::DLTensor& tensor) {
  if (tensor.device.device_type != dlpack::kDLCPU) return std::nullopt;
  size_t items = 1;
  for (int i = 0; i < tensor.ndim; ++i) items *= static_cast<size_t>(tensor.shape[i]);
  if (tensor.data == nullptr && items > 0) return std::nullopt;  // torch's that has no storage
  Strided found;
  found.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  found.dtype = dtype_of(tensor.dtype);
  found.item_bytes = size_t{tensor.dtype.bits} * tensor.dtype.lanes / 8;
  found.items = items;
  found.contiguous = items == 0 || is_contiguous(tensor);
  found.dimensions = tensor.ndim;
  if (tensor.ndim == 2) {
    found.rows = tensor.shape[0];
    found.columns = tensor.shape[1];
    found.row_stride = tensor.strides[0];
    found.column_stride = tensor.strides[1];
  }
  return found;
}

/// For dtypes that DLPack has no code for, and for classes derived from Tensor.
std::optional<Strided> read_attributes(py::handle tensor) {
  if (!tensor.attr("is_cpu").cast<bool>()) return std::nullopt;
  Strided found;
  try {
    found.data = reinterpret_cast<std::byte*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  } catch (const py::error_already_set&) {  // sparse, for instance
  }
  found.items = tensor.attr("numel")().cast<size_t>();
  if (found.data == nullptr && found.items > 0) return std::nullopt;
  const auto dtype = py::str(tensor.attr("dtype")).cast<std::string>();
  for (const auto& [known, name] : kNames) {
    if (dtype == name) found.dtype = known;
  }
  found.item_bytes = tensor.attr("element_size")().cast<size_t>();
  found.contiguous = tensor.attr("is_contiguous")().cast<bool>();
  const auto shape = tensor.attr("shape").cast<py::tuple>();
  found.dimensions = static_cast<int>(shape.size());
  if (shape.size() == 2) {
    const auto strides = tensor.attr("stride")().cast<py::tuple>();
    found.rows = shape[0].cast<int64_t>();
    found.columns = shape[1].cast<int64_t>();
    found.row_stride = strides[0].cast<int64_t>();
    found.column_stride = strides[1].cast<int64_t>();
  }
  return found;
}

}  // namespace

std::string names_of(Dtypes dtypes) {
  std::string names;
  for (const auto& [dtype, name] : kNames) {
    if ((dtypes & dtype) != 0) names += names.empty() ? name : std::string(" or ") + name;
  }
  return names;
}

bool is_tensor(py::handle object) {
  return PyType_IsSubtype(Py_TYPE(object.ptr()), torch_of_process().tensor) != 0;
}

std::optional<Strided> strided_of(py::handle tensor) {
  const Torch& torch = torch_of_process();
  PyTypeObject* const type = Py_TYPE(tensor.ptr());
  // Of other classes derived from Tensor nobody knows what lies where.
  if (torch.dlpack != nullptr && (type == torch.tensor || type == torch.parameter)) {
    dlpack::DLTensor view;
    if (torch.dlpack->dltensor_from_py_object_no_sync(tensor.ptr(), &view) != 0) {
      PyErr_Clear();
    } else {
      return read(view);
    }
  } else if (!is_tensor(tensor)) {
    return std::nullopt;
  }
  return read_attributes(tensor);
}

}  // namespace bls
