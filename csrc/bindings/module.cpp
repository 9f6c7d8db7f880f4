#include <pybind11/pybind11.h>

#include <cstring>

#include "bindings/bindings.h"
#include "bindings/python_interruption.h"
#include "channel/protocol.h"
#include "errors.h"
#include "transport/ring_shape.h"

namespace py = pybind11;

namespace {

const char* python_type(bls::ErrorKind kind) {
  switch (kind) {
    case bls::ErrorKind::kTimeout:
      return "PeerTimeoutError";
    case bls::ErrorKind::kPeerDied:
      return "PeerDiedError";
    case bls::ErrorKind::kPeerClosed:
      return "PeerClosedError";
    case bls::ErrorKind::kProtocol:
      return "ProtocolError";
    case bls::ErrorKind::kPoisoned:
      return "PoisonedError";
    case bls::ErrorKind::kRendezvous:
      return "RendezvousError";
    case bls::ErrorKind::kClosed:
      return "ChannelClosedError";
    case bls::ErrorKind::kTransport:
      return "TransportError";
  }
  return "BLSError";
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const bls::ChannelError& error) {
    const py::object type =
        py::module_::import("torchrec_bls.errors").attr(python_type(error.kind()));
    // The text may be another rank's and cut anywhere, even within a character.
    const py::object text = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(error.what(), std::strlen(error.what()), "replace"));
    PyErr_SetObject(type.ptr(), text.ptr());
  } catch (const bls::PythonInterruption& interruption) {
    interruption.raise();
  }
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "The compiled core of torchrec_bls: channel, transports and messages.";
  module.attr("WIRE_VERSION") = bls::kWireVersion;
  module.attr("MIN_SLOT_BYTES") = bls::kMinSlotBytes;
  module.attr("MAX_SLOT_BYTES") = bls::kMaxSlotBytes;
#ifdef BLS_WITH_VERBS
  module.attr("WITH_VERBS") = true;
#else
  module.attr("WITH_VERBS") = false;
#endif
  py::register_exception_translator(&translate);
  bls::bind_transports(module);
#ifdef BLS_WITH_VERBS
  bls::bind_verbs(module);
#endif
  bls::bind_channel(module);
  bls::bind_ids(module);
  bls::bind_codecs(module);
  bls::bind_frames(module);
  bls::bind_direct(module);
  bls::bind_rows(module);
  bls::bind_tables(module);
  bls::bind_all_to_all(module);
}
