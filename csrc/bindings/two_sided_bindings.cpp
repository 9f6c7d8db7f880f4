#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python_interruption.h"
#include "bindings/tensors/tensor_argument.h"
#include "bindings/transport_handle.h"
#include "errors.h"
#include "transport/two_sided/two_sided_transport.h"

namespace py = pybind11;

namespace bls {
namespace {

/// The slots of all ranks, in memory that the caller keeps.
Slots slots_in(const RingShape& shape, const Tensor& memory, const char* name) {
  const TensorItems items = items_of(memory, name, kUint8);
  const Slots slots{shape, items.data};
  check_count(name, items.count, slots.bytes(), "bytes");
  return slots;
}

/// The messenger is a Python object with methods of the same names. It keeps the tensors that
/// `expose` and `pull` return.
class PythonMessenger final : public Messenger {
 public:
  explicit PythonMessenger(py::object object) : object_(std::move(object)) {}
  ~PythonMessenger() override {
    const py::gil_scoped_acquire acquire;
    object_ = py::object();
  }
  PythonMessenger(const PythonMessenger&) = delete;
  PythonMessenger& operator=(const PythonMessenger&) = delete;

  void exchange(uint32_t slot, uint64_t sequence, std::span<const size_t> bytes) override {
    call("exchange", slot, sequence, std::vector<size_t>(bytes.begin(), bytes.end()));
  }
  std::byte* expose(int destination, uint32_t slot, size_t bytes) override {
    return call_for_memory("expose", bytes, destination, slot);
  }
  void retract(int destination, uint32_t slot) override { call("retract", destination, slot); }
  const std::byte* pull(int source, uint32_t slot, size_t bytes) override {
    return call_for_memory("pull", bytes, source, slot);
  }
  void drop(int source, uint32_t slot) override { call("drop", source, slot); }
  void return_credit(int source, uint64_t consumed) override {
    call("return_credit", source, consumed);
  }
  void ask(int peer) override { call("ask", peer); }
  void ask_for_end(int peer) override { call("ask_for_end", peer); }
  void spread_poison(int origin, const std::string& message) override {
    // The text may be another rank's and cut anywhere, even within a character.
    call("spread_poison", origin, py::bytes(message));
  }
  void close(uint64_t posted) override { call("close", posted); }
  void leave() override { call("leave"); }

 private:
  template <class... Arguments>
  void call(const char* method, const Arguments&... arguments) {
    checked([&] { object_.attr(method)(arguments...); });
  }

  std::byte* call_for_memory(const char* method, size_t bytes, int peer, uint32_t slot) {
    TensorItems memory;
    checked([&] {
      const Tensor tensor(object_.attr(method)(peer, slot, bytes));
      memory = items_of(tensor, method, kUint8);
      check_count(method, memory.count, bytes, "bytes");
    });
    return memory.data;
  }

  template <class Call>
  void checked(Call call) {
    const py::gil_scoped_acquire acquire;
    try {
      call();
    } catch (py::error_already_set& error) {
      const auto text = [&] { return py::str(error.value()).cast<std::string>(); };
      const auto errors = py::module_::import("torchrec_bls.errors");
      if (error.matches(errors.attr("PeerTimeoutError"))) {
        throw ChannelError(ErrorKind::kTimeout, text());
      }
      if (error.matches(errors.attr("TransportError"))) {
        throw ChannelError(ErrorKind::kTransport, text());
      }
      // Raised by a signal's handler: the messenger knows its own errors.
      throw PythonInterruption(std::move(error));
    }
  }

  py::object object_;
};

}  // namespace

void bind_two_sided(py::module_& module) {
  py::class_<TwoSidedInbox, std::shared_ptr<TwoSidedInbox>>(module, "TwoSidedInbox")
      .def(py::init([](int rank, int world_size, uint32_t slots, size_t slot_bytes,
                       const Tensor& memory) {
             const RingShape shape{rank, world_size, slots, slot_bytes, {}};
             return std::make_shared<TwoSidedInbox>(slots_in(shape, memory, "memory"));
           }),
           py::arg("rank"), py::arg("world_size"), py::arg("slots"), py::arg("slot_bytes"),
           py::arg("memory"))
      .def("arrived", &TwoSidedInbox::arrived, py::arg("peer"), py::arg("sequence"))
      .def("posted", &TwoSidedInbox::posted, py::arg("peer"), py::arg("count"))
      .def("read", &TwoSidedInbox::read, py::arg("peer"), py::arg("count"))
      .def("ended", &TwoSidedInbox::ended, py::arg("peer"), py::arg("count"))
      .def_property_readonly("told_end", &TwoSidedInbox::told_end)
      .def("closed", &TwoSidedInbox::closed, py::arg("peer"), py::arg("count"))
      .def(
          "died",
          [](TwoSidedInbox& inbox, int peer) { inbox.lost(peer, PeerState::kDead, std::string()); },
          py::arg("peer"))
      .def(
          "lost",
          [](TwoSidedInbox& inbox, int peer, const std::string& fault) {
            inbox.lost(peer, PeerState::kFailed, fault);
          },
          py::arg("peer"), py::arg("fault"))
      .def("failed", &TwoSidedInbox::failed, py::arg("fault"))
      .def(
          "poison",
          [](TwoSidedInbox& inbox, int origin, const py::bytes& message) {
            inbox.poison(origin, message);
          },
          py::arg("origin"), py::arg("message"))
      .def(
          "is_open",
          [](const TwoSidedInbox& inbox, int peer) {
            return inbox.state_of(peer) == PeerState::kOpen;
          },
          py::arg("peer"))
      .def_property_readonly(
          "poisoned", [](const TwoSidedInbox& inbox) { return inbox.poisoned().load() != 0; });

  using TwoSidedHandle = Handle<TwoSidedTransport>;
  py::class_<TwoSidedHandle, TransportHandle>(module, "TwoSidedTransport")
      .def(py::init([](py::object messenger, const std::shared_ptr<TwoSidedInbox>& inbox,
                       const Tensor& outboxes) {
             const Slots slots = slots_in(inbox->slots().shape, outboxes, "outboxes");
             return TwoSidedHandle(std::make_unique<TwoSidedTransport>(
                 std::make_unique<PythonMessenger>(std::move(messenger)), inbox, slots));
           }),
           py::arg("messenger"), py::arg("inbox"), py::arg("outboxes"));
}

}  // namespace bls
