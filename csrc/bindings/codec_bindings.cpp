#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/codec_number.h"
#include "bindings/tensors/tensor_argument.h"
#include "codecs/codec.h"
#include "codecs/stored_rows.h"
#include "errors.h"
#include "host/instruction_set.h"

namespace py = pybind11;

namespace bls {
namespace {

template <typename T>
Matrix<T> matrix(const TensorRows& rows) {
  return {rows.as<T>(), rows.rows, rows.columns, rows.stride};
}

size_t encode_to(uint8_t codec, const Tensor& rows, const Tensor& out) {
  const Matrix<const float> from = matrix<const float>(rows_apart_of(rows, "rows", kFloat32));
  const TensorItems to = items_of(out, "out", kUint8);
  check_end("out", to.count, 0, max_bytes(codec_of(codec), from.rows, from.columns), "bytes");
  const py::gil_scoped_release release;
  return encode(codec_of(codec), from, {to.data, to.count});
}

void decode_from(uint8_t codec, const Tensor& data, const Tensor& out) {
  const TensorItems from = items_of(data, "data", kUint8);
  const Matrix<float> to = matrix<float>(rows_apart_of(out, "out", kFloat32));
  const py::gil_scoped_release release;
  const size_t used = decode(codec_of(codec), {from.data, from.count}, to);
  if (used == from.count) return;
  throw ChannelError(ErrorKind::kProtocol,
                     "encoded rows have " + std::to_string(from.count - used) + " bytes too many");
}

size_t store_int8_rows(const Tensor& rows, const Tensor& out) {
  const TensorRows from = rows_of(rows, "rows", kFloat32);
  const TensorRows to = rows_of(out, "out", kUint8);
  check_rows("out", to, from.rows);
  const py::gil_scoped_release release;
  return stored_rows::store_int8(matrix<const float>(from), to.columns, to.data);
}

}  // namespace

void bind_codecs(py::module_& module) {
  module.attr("ERROR_BOUNDED") = static_cast<int>(Codec::kErrorBounded);
  module.def(
      "usual_encoded_bytes",
      [](uint8_t codec, size_t rows, size_t columns) {
        return usual_bytes(codec_of(codec), rows, columns);
      },
      py::arg("codec"), py::arg("rows"), py::arg("columns"));
  module.def(
      "max_encoded_bytes",
      [](uint8_t codec, size_t rows, size_t columns) {
        return max_bytes(codec_of(codec), rows, columns);
      },
      py::arg("codec"), py::arg("rows"), py::arg("columns"));
  module.def("encode_rows", &encode_to, py::arg("codec"), py::arg("rows"), py::arg("out"));
  module.def("decode_rows", &decode_from, py::arg("codec"), py::arg("data"), py::arg("out"));
  module.def("store_int8_rows", &store_int8_rows, py::arg("rows"), py::arg("out"));
  module.def("instruction_sets", &instruction_sets);
  module.def("use_instruction_set", &use_instruction_set, py::arg("name"));
}

}  // namespace bls
