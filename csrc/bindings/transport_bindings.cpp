#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/transport_handle.h"
#include "transport/mixed/mixed_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace py = pybind11;

namespace bls {
namespace {

using AddressTuple = std::tuple<int32_t, int32_t, uint64_t, uint64_t, uint64_t>;

AddressTuple to_tuple(const SegmentAddress& a) { return {a.pid, a.fd, a.device, a.inode, a.bytes}; }

SegmentAddress from_tuple(const AddressTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t)};
}

std::unique_ptr<NetworkTransport> between_hosts(std::unique_ptr<Transport> transport) {
  auto* const network = dynamic_cast<NetworkTransport*>(transport.get());
  if (network == nullptr) throw std::invalid_argument("the transport is none between hosts");
  static_cast<void>(transport.release());
  return std::unique_ptr<NetworkTransport>(network);
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

  using TcpHandle = Handle<TcpTransport>;
  py::class_<TcpHandle, TransportHandle>(module, "TcpTransport")
      .def(py::init([](const std::vector<int>& sockets, int rank, uint32_t slots, size_t slot_bytes,
                       double deadline_seconds, const std::vector<std::string>& names) {
             std::vector<Descriptor> owned;
             for (const int fd : sockets) owned.push_back(fd < 0 ? Descriptor() : duplicated(fd));
             const RingShape shape{rank, static_cast<int>(sockets.size()), slots, slot_bytes,
                                   RankNames(names)};
             return TcpHandle(std::make_unique<TcpTransport>(std::move(owned), shape,
                                                             milliseconds(deadline_seconds)));
           }),
           py::arg("sockets"), py::arg("rank"), py::arg("slots"), py::arg("slot_bytes"),
           py::arg("deadline_seconds"), py::arg("names") = std::vector<std::string>());

  using MixedHandle = Handle<MixedTransport>;
  py::class_<MixedHandle, TransportHandle>(module, "MixedTransport")
      .def(py::init([](ShmHandle& shm, TransportHandle& network,
                       const std::vector<int>& local_ranks, int world_size) {
             return MixedHandle(std::make_unique<MixedTransport>(
                 shm.take_own(), between_hosts(network.take()), local_ranks, world_size));
           }),
           py::arg("shm"), py::arg("network"), py::arg("local_ranks"), py::arg("world_size"));
}

}  // namespace bls
