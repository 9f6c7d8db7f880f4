#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "codecs/codec.h"
#include "codecs/kernels.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (address, rows, columns, items from one row to the next)
using MatrixTuple = std::tuple<uintptr_t, size_t, size_t, size_t>;

template <typename T>
Matrix<T> matrix(const MatrixTuple& tuple) {
  const auto& [address, rows, columns, stride] = tuple;
  return {reinterpret_cast<T*>(address), rows, columns, stride};
}

Codec codec_of(uint8_t number) {
  if (number >= kCodecs) throw std::invalid_argument("no codec " + std::to_string(number));
  return static_cast<Codec>(number);
}

}  // namespace

void bind_codecs(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("usual_encoded_bytes", [](uint8_t codec, size_t rows, size_t columns) {
    return usual_bytes(codec_of(codec), rows, columns);
  });
  module.def("max_encoded_bytes", [](uint8_t codec, size_t rows, size_t columns) {
    return max_bytes(codec_of(codec), rows, columns);
  });
  module.def(
      "encode_rows",
      [](uint8_t codec, const MatrixTuple& rows, uintptr_t out) {
        return encode(codec_of(codec), matrix<const float>(rows), pointer(out));
      },
      Release());
  module.def(
      "decode_rows",
      [](uint8_t codec, uintptr_t in, size_t bytes, const MatrixTuple& rows) {
        decode(codec_of(codec), {pointer(in), bytes}, matrix<float>(rows));
      },
      Release());
  module.def("instruction_sets", &instruction_sets);
  module.def("use_instruction_set", &use_instruction_set);
}

}  // namespace bls
