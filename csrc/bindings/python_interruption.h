#pragma once

#include <pybind11/pybind11.h>

#include "errors.h"
#include "transport/transport.h"

namespace bls {

/// An exception of Python that ends a call of a channel: what a signal's handler raised.
class PythonInterruption : public Interruption {
 public:
  /// Takes `error`, with the GIL.
  explicit PythonInterruption(pybind11::error_already_set error);

  /// Makes it Python's current exception, with the GIL.
  void raise() const;
  /// Raises it in the main thread as soon as that runs Python code, as a signal's handler would.
  /// For where nothing can be raised. Takes the GIL.
  void raise_later() const;

 private:
  pybind11::error_already_set error_;
};

/// Runs the handlers of signals that have come, as Python does between two instructions, and throws
/// PythonInterruption if one of them raises. Handlers run in the main thread only: in another one
/// this does nothing. Looks so seldom that the GIL, which it takes, is not contended for.
class SignalCheck {
 public:
  /// With the GIL.
  SignalCheck();
  void operator()();

 private:
  unsigned long main_thread_;
  Clock::time_point next_;
};

}  // namespace bls
