#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "messages/all_reduce.h"
#include "messages/all_to_all.h"
#include "messages/reduce_scatter.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (address, bytes)
using BufferTuple = std::tuple<uintptr_t, size_t>;

std::vector<Buffer> buffers_of(const std::vector<BufferTuple>& tuples) {
  std::vector<Buffer> buffers;
  buffers.reserve(tuples.size());
  for (const auto& [address, bytes] : tuples) buffers.push_back({pointer(address), bytes});
  return buffers;
}

}  // namespace

void bind_all_to_all(py::module_& module) {
  module.def("post_buffers", [](Channel& channel, const std::vector<BufferTuple>& tuples) {
    const std::vector<Buffer> buffers = buffers_of(tuples);
    const py::gil_scoped_release release;
    post_buffers(channel, buffers);
  });
  module.def("collect_buffers", [](const Arrival& arrival, const std::vector<BufferTuple>& tuples) {
    const std::vector<Buffer> buffers = buffers_of(tuples);
    const py::gil_scoped_release release;
    collect_buffers(arrival, buffers);
  });
  module.def("collect_sum", [](const Arrival& arrival, int rank, uintptr_t output, size_t floats) {
    const py::gil_scoped_release release;
    collect_sum(arrival, rank, {reinterpret_cast<float*>(output), floats});
  });

  module.attr("ALL_REDUCE_POSTS") = kAllReducePosts;
  module.def("all_reduce", [](Channel& channel, uint8_t element, uint8_t reduction, uintptr_t data,
                              size_t count) {
    if (element >= kElements || reduction >= kReductions) {
      throw std::invalid_argument("no such element or reduction");
    }
    const py::gil_scoped_release release;
    all_reduce(channel, static_cast<Element>(element), static_cast<Reduction>(reduction),
               reinterpret_cast<std::byte*>(data), count);
  });
}

}  // namespace bls
