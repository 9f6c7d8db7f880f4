#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensors/tensor_argument.h"
#include "messages/all_reduce.h"
#include "messages/all_to_all.h"
#include "messages/reduce_scatter.h"

namespace py = pybind11;

namespace bls {
namespace {

/// Memory of one buffer a rank, which it keeps.
struct Buffers {
  std::vector<Buffer> by_rank;
  py::object owner;
};

Buffers whole(const std::vector<Tensor>& tensors) {
  Buffers buffers;
  for (const Tensor& tensor : tensors) {
    const TensorItems items = items_of(tensor, "a tensor", kAnyDtype);
    buffers.by_rank.push_back({items.data, items.bytes()});
  }
  buffers.owner = py::cast(tensors);
  return buffers;
}

Buffers split(const Tensor& tensor, const std::vector<size_t>& bytes) {
  const TensorItems items = items_of(tensor, "tensor", kAnyDtype);
  check_count("tensor", items.bytes(), std::accumulate(bytes.begin(), bytes.end(), size_t{0}),
              "bytes");
  Buffers buffers;
  std::byte* at = items.data;
  for (const size_t of_rank : bytes) {
    buffers.by_rank.push_back({at, of_rank});
    at += of_rank;
  }
  buffers.owner = tensor;
  return buffers;
}

Element element_of(Dtype dtype) {
  switch (dtype) {
    case kFloat32:
      return Element::kFloat32;
    case kFloat64:
      return Element::kFloat64;
    case kFloat16:
      return Element::kFloat16;
    case kBfloat16:
      return Element::kBfloat16;
    case kInt32:
      return Element::kInt32;
    default:
      return Element::kInt64;
  }
}
constexpr Dtypes kReduced = kFloat32 | kFloat64 | kFloat16 | kBfloat16 | kInt32 | kInt64;

}  // namespace

void bind_all_to_all(py::module_& module) {
  py::class_<Buffers>(module, "Buffers")
      .def_static("whole", &whole, py::arg("tensors"))
      .def_static("split", &split, py::arg("tensor"), py::arg("bytes"));
  module.def(
      "post_buffers",
      [](Channel& channel, const Buffers& buffers) {
        const py::gil_scoped_release release;
        post_buffers(channel, buffers.by_rank);
      },
      py::arg("channel"), py::arg("buffers"));
  module.def(
      "collect_buffers",
      [](const Arrival& arrival, const Buffers& buffers) {
        const py::gil_scoped_release release;
        collect_buffers(arrival, buffers.by_rank);
      },
      py::arg("arrival"), py::arg("buffers"));
  module.def(
      "collect_sum",
      [](const Arrival& arrival, int rank, const Tensor& output) {
        const TensorItems floats = items_of(output, "output", kFloat32);
        const py::gil_scoped_release release;
        collect_sum(arrival, rank, {floats.as<float>(), floats.count});
      },
      py::arg("arrival"), py::arg("rank"), py::arg("output"));

  module.attr("ALL_REDUCE_POSTS") = kAllReducePosts;
  module.def(
      "all_reduce",
      [](Channel& channel, const Tensor& tensor, uint8_t reduction) {
        const TensorItems items = items_of(tensor, "tensor", kReduced);
        if (reduction >= kReductions) {
          throw std::invalid_argument("no reduction has the number " + std::to_string(reduction));
        }
        const py::gil_scoped_release release;
        all_reduce(channel, element_of(items.dtype), static_cast<Reduction>(reduction), items.data,
                   items.count);
      },
      py::arg("channel"), py::arg("tensor"), py::arg("reduction"));
}

}  // namespace bls
