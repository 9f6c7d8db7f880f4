#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python_interruption.h"
#include "bindings/tensors/tensor_memory.h"
#include "bindings/transport_handle.h"
#include "channel/channel.h"
#include "messages/message_builder.h"

namespace py = pybind11;

namespace bls {
namespace {

/// What this rank's messages to itself show, by sequence number.
using Own = py::typing::Dict<uint64_t, py::object>;
using Tensors = py::typing::Iterable<py::object>;

/// Adds to `own` what it posts to itself, unless that fails.
uint64_t post(Channel& channel, const py::typing::Iterable<Tensors>& parts, const Own& own) {
  std::vector<py::tuple> tensors;  // by rank, so that nobody changes them meanwhile
  size_t count = 0;
  for (const py::handle message : parts) {
    tensors.push_back(py::reinterpret_steal<py::tuple>(PySequence_Tuple(message.ptr())));
    if (!tensors.back()) throw py::error_already_set();
    count += tensors.back().size();
  }
  MessageBuilder builder(tensors.size(), count, count);
  for (const py::tuple& message : tensors) {
    builder.add_message();
    for (const py::handle tensor : message) {
      builder.add_part();
      builder.add_block(memory_of(tensor));
    }
  }
  const py::int_ sequence(channel.posted());
  const auto rank = static_cast<size_t>(channel.config().rank);
  if (rank < tensors.size()) own[sequence] = tensors[rank];
  try {
    const py::gil_scoped_release release;
    return channel.post(builder.messages());
  } catch (...) {
    if (channel.posted() == sequence.cast<uint64_t>()) own.attr("pop")(sequence, py::none());
    throw;
  }
}

/// Nothing where it is released already.
void release(Channel& channel, uint64_t sequence, const Own& own) {
  const uint64_t next = channel.released();
  if (sequence < next) return;
  if (sequence > next) {
    throw std::invalid_argument("sequence " + std::to_string(next) + " of channel '" +
                                channel.config().name + "' has to be released before sequence " +
                                std::to_string(sequence));
  }
  channel.release();
  if (PyDict_DelItem(own.ptr(), py::int_(sequence).ptr()) != 0) PyErr_Clear();  // nothing was kept
}

/// A channel that ends may wait for threads that run Python.
struct DeleteWithoutGil {
  void operator()(Channel* channel) const {
    const py::gil_scoped_release release;
    try {
      channel->close();
    } catch (const PythonInterruption& interruption) {
      interruption.raise_later();
    } catch (...) {  // the peers know, and here is nobody to tell
    }
    delete channel;
  }
};
using ChannelHolder = std::unique_ptr<Channel, DeleteWithoutGil>;

std::span<const View> parts_from(const Arrival& arrival, int source) {
  if (source < 0 || source >= arrival.world_size()) {
    throw py::index_error("rank " + std::to_string(source) + " of " +
                          std::to_string(arrival.world_size()));
  }
  return arrival.parts(source);
}

/// Bytes that a channel holds, and what keeps them there.
struct OwnedView {
  View view;
  py::object owner;
};

/// The memory stays for as long as anything is made of the view, whatever becomes of the channel.
py::memoryview view_of(py::object self, int source, size_t index) {
  const auto& arrival = self.cast<const Arrival&>();
  const auto parts = parts_from(arrival, source);
  if (index >= parts.size()) {
    throw py::index_error("part " + std::to_string(index) + " of " + std::to_string(parts.size()) +
                          " from rank " + std::to_string(source));
  }
  return py::memoryview(py::cast(OwnedView{parts[index], std::move(self)}));
}

py::buffer_info buffer_of(const OwnedView& owned) {
  // Writable because torch has no read-only tensors; the memory is this rank's own.
  auto* data = const_cast<std::byte*>(owned.view.data);
  return {reinterpret_cast<uint8_t*>(data), static_cast<py::ssize_t>(owned.view.bytes)};
}

}  // namespace

void bind_channel(py::module_& module) {
  py::class_<ChannelStats>(module, "ChannelStats")
      .def_readonly("messages", &ChannelStats::messages)
      .def_readonly("bytes", &ChannelStats::bytes)
      .def_readonly("pulled_messages", &ChannelStats::pulled_messages)
      .def_readonly("largest_message", &ChannelStats::largest_message)
      .def_readonly("wait_seconds", &ChannelStats::wait_seconds)
      .def_readonly("lag_histogram", &ChannelStats::lag_histogram);

  py::class_<OwnedView>(module, "View", py::buffer_protocol()).def_buffer(&buffer_of);

  py::class_<Arrival>(module, "Arrival")
      .def_property_readonly("sequence", &Arrival::sequence)
      .def(
          "part_count", [](const Arrival& a, int source) { return parts_from(a, source).size(); },
          py::arg("source"))
      .def("view", &view_of, py::arg("source"), py::arg("index"));

  py::class_<Channel, ChannelHolder>(module, "Channel")
      .def(py::init([](TransportHandle& transport, int rank, int world_size, uint32_t bound,
                       uint32_t slots, double deadline_seconds, const std::string& name,
                       int local_ranks, const std::vector<std::string>& names,
                       const std::string& deadline_name) {
             ChannelConfig config{rank, world_size, bound, slots, {}, name, local_ranks};
             config.names = RankNames(names);
             config.deadline_name = deadline_name;
             config.deadline = milliseconds(deadline_seconds);
             config.interrupt = SignalCheck();
             return ChannelHolder(new Channel(transport.take(), config));
           }),
           py::arg("transport"), py::arg("rank"), py::arg("world_size"), py::arg("bound"),
           py::arg("slots"), py::arg("deadline_seconds"), py::arg("name"), py::arg("local_ranks"),
           py::arg("names") = std::vector<std::string>(), py::arg("deadline_name") = "the deadline")
      .def("post", &post, py::arg("parts"), py::arg("own"))
      .def("label", &Channel::label, py::arg("label"))
      .def("wait", &Channel::wait, py::return_value_policy::reference_internal,
           py::call_guard<py::gil_scoped_release>())
      .def("ready", &Channel::ready)
      .def("release", &release, py::arg("sequence"), py::arg("own"))
      .def("tell_end", &Channel::tell_end, py::arg("forwards"))
      .def("called", &Channel::called, py::arg("forwards"),
           py::call_guard<py::gil_scoped_release>())
      .def("not_ended", &Channel::not_ended, py::arg("forwards"),
           py::call_guard<py::gil_scoped_release>())
      .def("poison", &Channel::poison, py::arg("reason"))
      .def("close", &Channel::close, py::call_guard<py::gil_scoped_release>())
      // For the owner of what the messages to this rank itself are views of.
      .def(
          "keep", [](Channel&, const py::object&) {}, py::keep_alive<1, 2>(), py::arg("owner"))
      .def("abandon", &Channel::abandon)
      .def("stats", &Channel::stats)
      .def_property_readonly("pulled_messages", &Channel::pulled_messages)
      .def_property_readonly("posted", &Channel::posted)
      .def_property_readonly("completed", &Channel::completed)
      .def_property_readonly("released", &Channel::released)
      .def_property_readonly("slot_bytes",
                             [](const Channel& c) { return c.transport().slot_bytes(); })
      .def_property_readonly("ring_bytes",
                             [](const Channel& c) { return c.transport().ring_bytes(); });
}

}  // namespace bls
