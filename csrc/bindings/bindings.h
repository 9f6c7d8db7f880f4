#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>

namespace bls {

void bind_all_to_all(pybind11::module_& module);
void bind_channel(pybind11::module_& module);
void bind_codecs(pybind11::module_& module);
void bind_direct(pybind11::module_& module);
void bind_frames(pybind11::module_& module);
void bind_ids(pybind11::module_& module);
void bind_rows(pybind11::module_& module);
void bind_tables(pybind11::module_& module);
void bind_transports(pybind11::module_& module);
/// Where the package was built with RDMA.
void bind_verbs(pybind11::module_& module);

inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace bls
