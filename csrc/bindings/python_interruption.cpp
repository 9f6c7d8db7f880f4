#include "bindings/python_interruption.h"

#include <string>
#include <utility>

namespace py = pybind11;

namespace bls {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{20};

/// What an exception is called where only its text goes.
std::string name_of(const py::error_already_set& error) {
  std::string name = py::str(error.type().attr("__name__"));
  const py::object text = py::reinterpret_steal<py::object>(PyObject_Str(error.value().ptr()));
  if (!text) {
    PyErr_Clear();
    return name;
  }
  const auto bytes =
      py::reinterpret_steal<py::object>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace"));
  if (!bytes) {
    PyErr_Clear();
    return name;
  }
  const std::string said = bytes.cast<std::string>();
  return said.empty() ? name : name + ": " + said;
}

/// For Py_AddPendingCall, of an exception that it owns.
int raise_pending(void* exception) {
  auto* const value = static_cast<PyObject*>(exception);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
  return -1;
}

}  // namespace

PythonInterruption::PythonInterruption(py::error_already_set error)
    : Interruption(name_of(error)), error_(std::move(error)) {}

void PythonInterruption::raise() const {
  PyErr_Restore(error_.type().inc_ref().ptr(), error_.value().inc_ref().ptr(),
                error_.trace() ? error_.trace().inc_ref().ptr() : nullptr);
}

void PythonInterruption::raise_later() const {
  const py::gil_scoped_acquire acquire;
  PyObject* const value = error_.value().inc_ref().ptr();
  if (Py_AddPendingCall(&raise_pending, value) == 0) return;
  raise();  // too many are pending
  PyErr_WriteUnraisable(nullptr);
  Py_DECREF(value);
}

SignalCheck::SignalCheck()
    : main_thread_(py::module_::import("threading")
                       .attr("main_thread")()
                       .attr("ident")
                       .cast<unsigned long>()) {}

void SignalCheck::operator()() {
  if (PyThread_get_thread_ident() != main_thread_) return;
  const Clock::time_point now = Clock::now();
  if (now < next_) return;
  next_ = now + kBetweenLooks;
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw PythonInterruption(py::error_already_set());
}

}  // namespace bls
