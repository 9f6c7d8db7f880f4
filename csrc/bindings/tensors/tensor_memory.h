#pragma once

#include <pybind11/pybind11.h>

#include "channel/message.h"

namespace bls {

/// The memory of a tensor on the CPU that is contiguous, or has two dimensions and contiguous rows.
/// It is the tensor's. Throws py::type_error for what is no tensor and py::value_error for others.
///
/// Read through the C functions that torch.Tensor names for DLPack: tens of nanoseconds, and no
/// header of torch, where asking for its attributes takes a microsecond.
Block memory_of(pybind11::handle tensor);

}  // namespace bls
