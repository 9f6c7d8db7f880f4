#pragma once

#include <pybind11/pybind11.h>

#include "channel/message.h"

namespace bls {

/// The memory of a tensor that is posted: on the CPU and contiguous, or with two dimensions and
/// contiguous rows. It is the tensor's. Throws py::type_error for what is no tensor and
/// py::value_error for others.
Block memory_of(pybind11::handle tensor);

}  // namespace bls
