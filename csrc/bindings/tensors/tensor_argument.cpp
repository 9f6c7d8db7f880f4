#include "bindings/tensors/tensor_argument.h"

#include <optional>

namespace py = pybind11;

namespace bls {
namespace {

/// `form`: "a contiguous tensor", for instance.
[[noreturn]] void refuse(const Tensor& tensor, const char* name, const char* form, Dtypes dtypes) {
  if (!is_tensor(tensor)) {
    throw py::type_error(std::string(name) + " is a " + Py_TYPE(tensor.ptr())->tp_name +
                         ", but must be a torch.Tensor");
  }
  const auto said = [&](const char* attribute) {
    return std::string(py::str(tensor.attr(attribute)));
  };
  const std::string layout = said("layout");
  const bool strided = layout == "torch.strided";
  const std::string strides =
      strided ? std::string(py::str(py::list(tensor.attr("stride")()))) : std::string();
  const std::string of = dtypes == kAnyDtype ? std::string() : " of " + names_of(dtypes);
  throw py::value_error(std::string(name) + " is a " + Py_TYPE(tensor.ptr())->tp_name + " of " +
                        said("dtype") + " on " + said("device") + ", of shape " +
                        std::string(py::str(py::list(tensor.attr("shape")))) + " and " +
                        (strided ? "strides " + strides : "layout " + layout) + ", but must be " +
                        form + of + " on the CPU");
}

TensorRows rows_from(const Strided& found) {
  const auto columns = static_cast<size_t>(found.columns);
  return {found.data,       static_cast<size_t>(found.rows),
          columns,          found.contiguous ? columns : static_cast<size_t>(found.row_stride),
          found.item_bytes, found.dtype};
}

}  // namespace

TensorItems items_of(const Tensor& tensor, const char* name, Dtypes dtypes) {
  const std::optional<Strided> found = strided_of(tensor);
  if (!found || !found->contiguous || (found->dtype & dtypes) == 0) {
    refuse(tensor, name, "a contiguous tensor", dtypes);
  }
  return {found->data, found->items, found->item_bytes, found->dtype};
}

TensorRows rows_of(const Tensor& tensor, const char* name, Dtypes dtypes) {
  const std::optional<Strided> found = strided_of(tensor);
  if (!found || !found->contiguous || found->dimensions != 2 || (found->dtype & dtypes) == 0) {
    refuse(tensor, name, "a contiguous matrix", dtypes);
  }
  return rows_from(*found);
}

TensorRows rows_apart_of(const Tensor& tensor, const char* name, Dtypes dtypes) {
  const std::optional<Strided> found = strided_of(tensor);
  if (!found || !found->has_whole_rows() || (found->dtype & dtypes) == 0) {
    refuse(tensor, name, "a matrix with contiguous rows", dtypes);
  }
  return rows_from(*found);
}

void check_count(const char* name, size_t has, size_t must_be, const char* things) {
  if (has == must_be) return;
  throw py::value_error(std::string(name) + " has " + std::to_string(has) + " " + things +
                        ", but must have " + std::to_string(must_be));
}

void check_rows(const char* name, const TensorRows& rows, size_t must_be) {
  if (rows.row_bytes() != 0) check_count(name, rows.rows, must_be, "rows");
}

void check_end(const char* name, size_t has, size_t first, size_t count, const char* things) {
  if (first <= has && count <= has - first) return;
  throw py::value_error(std::string(name) + " has " + std::to_string(has) + " " + things +
                        ", but " + std::to_string(count) + " from number " + std::to_string(first) +
                        " on are needed");
}

}  // namespace bls
