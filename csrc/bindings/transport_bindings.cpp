#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/transport_handle.h"
#include "transport/shm/shm_transport.h"

namespace py = pybind11;

namespace bls {
namespace {

using AddressTuple = std::tuple<int32_t, int32_t, uint64_t, uint64_t, uint64_t>;

AddressTuple to_tuple(const SegmentAddress& a) { return {a.pid, a.fd, a.device, a.inode, a.bytes}; }

SegmentAddress from_tuple(const AddressTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t)};
}

}  // namespace

void bind_transports(py::module_& module) {
  py::class_<TransportHandle>(module, "Transport");

  using ShmHandle = Handle<ShmTransport>;
  py::class_<ShmHandle, TransportHandle>(module, "ShmTransport")
      .def(py::init([](int rank, int world_size, uint32_t slots, size_t slot_bytes,
                       const std::vector<std::string>& names) {
             return ShmHandle(std::make_unique<ShmTransport>(
                 RingShape{rank, world_size, slots, slot_bytes, RankNames(names)}));
           }),
           py::arg("rank"), py::arg("world_size"), py::arg("slots"), py::arg("slot_bytes"),
           py::arg("names") = std::vector<std::string>())
      .def_property_readonly("address",
                             [](const ShmHandle& t) { return to_tuple(t.get().address()); })
      .def(
          "connect",
          [](ShmHandle& t, const std::vector<AddressTuple>& addresses) {
            std::vector<SegmentAddress> list;
            for (const AddressTuple& a : addresses) list.push_back(from_tuple(a));
            const py::gil_scoped_release release;
            t.get().connect(list);
          },
          py::arg("addresses"))
      .def("seal", [](ShmHandle& t) { t.get().seal(); });
}

}  // namespace bls
