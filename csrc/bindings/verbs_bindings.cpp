#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/transport_handle.h"
#include "transport/verbs/verbs_transport.h"

namespace py = pybind11;

namespace bls {
namespace {

using Gid = std::array<uint8_t, sizeof(ibv_gid::raw)>;
/// (gid, lid, mtu, packet number, memory, its bytes, remote key, queue pairs, places)
using AddressTuple = std::tuple<Gid, uint16_t, uint32_t, uint32_t, uint64_t, uint64_t, uint32_t,
                                std::vector<uint32_t>, std::vector<uint32_t>>;

AddressTuple to_tuple(const VerbsAddress& a) {
  Gid gid;
  std::copy_n(a.gid.raw, gid.size(), gid.begin());
  return {gid,          a.lid,         a.mtu,   a.packet_number, a.memory, a.memory_bytes,
          a.remote_key, a.queue_pairs, a.places};
}

VerbsAddress from_tuple(const AddressTuple& t) {
  VerbsAddress address;
  const Gid& gid = std::get<0>(t);
  std::copy(gid.begin(), gid.end(), address.gid.raw);
  address.lid = std::get<1>(t);
  address.mtu = std::get<2>(t);
  address.packet_number = std::get<3>(t);
  address.memory = std::get<4>(t);
  address.memory_bytes = std::get<5>(t);
  address.remote_key = std::get<6>(t);
  address.queue_pairs = std::get<7>(t);
  address.places = std::get<8>(t);
  return address;
}

}  // namespace

void bind_verbs(py::module_& module) {
  py::class_<VerbsConfig>(module, "VerbsConfig")
      .def(py::init<>())
      .def_readwrite("device", &VerbsConfig::device)
      .def_readwrite("port", &VerbsConfig::port)
      .def_readwrite("gid_index", &VerbsConfig::gid_index)
      .def_readwrite("mtu", &VerbsConfig::mtu)
      .def_readwrite("traffic_class", &VerbsConfig::traffic_class)
      .def_readwrite("service_level", &VerbsConfig::service_level)
      .def_readwrite("timeout", &VerbsConfig::timeout)
      .def_readwrite("retry_count", &VerbsConfig::retry_count)
      .def_readwrite("rnr_retry", &VerbsConfig::rnr_retry)
      .def_readwrite("min_rnr_timer", &VerbsConfig::min_rnr_timer)
      .def_readwrite("inline_bytes", &VerbsConfig::inline_bytes);

  // (bytes of a packet, bytes of the largest message), for the doctor
  module.def(
      "port_limits",
      [](const std::string& device, int port) {
        VerbsConfig config;
        config.device = device;
        config.port = port;
        const VerbsDevice opened(load_ibverbs(), config);
        return std::tuple(opened.mtu(), opened.port_attributes().max_msg_sz);
      },
      py::arg("device"), py::arg("port"));

  using VerbsHandle = Handle<VerbsTransport>;
  py::class_<VerbsHandle, TransportHandle>(module, "VerbsTransport")
      .def(py::init([](const VerbsConfig& config, int rank, int world_size, uint32_t slots,
                       size_t slot_bytes, double deadline_seconds, const std::vector<int>& peers,
                       const std::vector<std::string>& names) {
             const py::gil_scoped_release release;
             return VerbsHandle(std::make_unique<VerbsTransport>(
                 load_ibverbs(), config,
                 RingShape{rank, world_size, slots, slot_bytes, RankNames(names)},
                 milliseconds(deadline_seconds), peers));
           }),
           py::arg("config"), py::arg("rank"), py::arg("world_size"), py::arg("slots"),
           py::arg("slot_bytes"), py::arg("deadline_seconds"), py::arg("peers"),
           py::arg("names") = std::vector<std::string>())
      .def_property_readonly("address",
                             [](const VerbsHandle& t) { return to_tuple(t.get().address()); })
      .def_property_readonly("device",
                             [](const VerbsHandle& t) { return t.get().device().label(); })
      .def_property_readonly("fork_hazard",
                             [](const VerbsHandle& t) { return t.get().device().fork_hazard(); })
      .def_property_readonly("link",
                             [](const VerbsHandle& t) {
                               const auto& port = t.get().device().port_attributes();
                               return port.link_layer == IBV_LINK_LAYER_ETHERNET ? "RoCE"
                                                                                 : "InfiniBand";
                             })
      .def(
          "connect",
          [](VerbsHandle& t, const std::vector<AddressTuple>& addresses) {
            std::vector<VerbsAddress> list;
            for (const AddressTuple& a : addresses) list.push_back(from_tuple(a));
            const py::gil_scoped_release release;
            t.get().connect(list);
          },
          py::arg("addresses"));
}

}  // namespace bls
