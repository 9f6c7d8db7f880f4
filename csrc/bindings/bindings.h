#pragma once

#include <pybind11/pybind11.h>

namespace bls {

void bind_channel(pybind11::module_& module);
void bind_codecs(pybind11::module_& module);
void bind_rows(pybind11::module_& module);

/// Tensors cross the border as addresses: no torch header, no torch ABI.
inline std::byte* pointer(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace bls
