#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python_interruption.h"
#include "bindings/transport_handle.h"
#include "errors.h"
#include "transport/two_sided/two_sided_transport.h"

namespace py = pybind11;

namespace bls {
namespace {

/// The messenger is a Python object with methods of the same names.
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
    return call_for_memory("expose", destination, slot, bytes);
  }
  void retract(int destination, uint32_t slot) override { call("retract", destination, slot); }
  const std::byte* pull(int source, uint32_t slot, size_t bytes) override {
    return call_for_memory("pull", source, slot, bytes);
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

  template <class... Arguments>
  std::byte* call_for_memory(const char* method, const Arguments&... arguments) {
    std::byte* memory = nullptr;
    checked(
        [&] { memory = pointer(object_.attr(method)(arguments...).template cast<uintptr_t>()); });
    return memory;
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
      .def(py::init(
               [](int rank, int world_size, uint32_t slots, size_t slot_bytes, uintptr_t memory) {
                 return std::make_shared<TwoSidedInbox>(
                     Slots{{rank, world_size, slots, slot_bytes}, pointer(memory)});
               }),
           py::arg("rank"), py::arg("world_size"), py::arg("slots"), py::arg("slot_bytes"),
           py::arg("memory"))
      .def("arrived", &TwoSidedInbox::arrived)
      .def("posted", &TwoSidedInbox::posted)
      .def("read", &TwoSidedInbox::read)
      .def("ended", &TwoSidedInbox::ended)
      .def_property_readonly("told_end", &TwoSidedInbox::told_end)
      .def("closed", &TwoSidedInbox::closed)
      .def("died", [](TwoSidedInbox& inbox,
                      int peer) { inbox.lost(peer, PeerState::kDead, std::string()); })
      .def("lost", [](TwoSidedInbox& inbox, int peer,
                      const std::string& fault) { inbox.lost(peer, PeerState::kFailed, fault); })
      .def("failed", &TwoSidedInbox::failed)
      .def("poison", [](TwoSidedInbox& inbox, int origin,
                        const py::bytes& message) { inbox.poison(origin, message); })
      .def("is_open", [](const TwoSidedInbox& inbox,
                         int peer) { return inbox.state_of(peer) == PeerState::kOpen; })
      .def_property_readonly(
          "poisoned", [](const TwoSidedInbox& inbox) { return inbox.poisoned().load() != 0; });

  using TwoSidedHandle = Handle<TwoSidedTransport>;
  py::class_<TwoSidedHandle, TransportHandle>(module, "TwoSidedTransport")
      .def(py::init([](py::object messenger, const std::shared_ptr<TwoSidedInbox>& inbox,
                       uintptr_t outboxes) {
             return TwoSidedHandle(std::make_unique<TwoSidedTransport>(
                 std::make_unique<PythonMessenger>(std::move(messenger)), inbox,
                 Slots{inbox->slots().shape, pointer(outboxes)}));
           }),
           py::arg("messenger"), py::arg("inbox"), py::arg("outboxes"));
}

}  // namespace bls
