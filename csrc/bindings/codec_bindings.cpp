#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "codecs/codec.h"
#include "host/instruction_set.h"
#include "messages/frame_message.h"

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

/// (codec, address, rows, columns, items from one row to the next, error bound or 0, whether codes
/// have a fixed width, address of the group of each row as uint32 or 0, groups)
using TableTuple =
    std::tuple<uint8_t, uintptr_t, size_t, size_t, size_t, float, bool, uintptr_t, size_t>;

template <typename T>
FrameTable<T> table(const TableTuple& tuple, bool summed) {
  const auto& [codec, address, rows, columns, stride, bound, fixed_width, of_row, groups] = tuple;
  FrameTable<T> result{codec_of(codec), matrix<T>({address, rows, columns, stride}), bound};
  result.fixed_width = fixed_width;
  if (of_row != 0) {
    result.groups = {{reinterpret_cast<const uint32_t*>(of_row), rows}, groups};
    result.summed = summed;
  }
  return result;
}

/// The tables of all frames, and which are whose.
template <typename T>
class FrameList {
 public:
  /// `summed`: the rows of a group travel as their sum, in place of the first one.
  explicit FrameList(const std::vector<std::vector<TableTuple>>& frames, bool summed = false) {
    size_t count = 0;
    for (const auto& frame : frames) count += frame.size();
    tables_.reserve(count);  // spans point into it
    for (const auto& frame : frames) {
      const size_t first = tables_.size();
      for (const auto& tuple : frame) tables_.push_back(table<T>(tuple, summed));
      spans_.emplace_back(tables_.data() + first, frame.size());
    }
  }
  Frames<T> frames() const { return spans_; }

 private:
  std::vector<FrameTable<T>> tables_;
  std::vector<std::span<const FrameTable<T>>> spans_;
};

}  // namespace

void bind_codecs(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.attr("ERROR_BOUNDED") = static_cast<int>(Codec::kErrorBounded);
  module.def("usual_encoded_bytes", [](uint8_t codec, size_t rows, size_t columns) {
    return usual_bytes(codec_of(codec), rows, columns);
  });
  module.def("max_encoded_bytes", [](uint8_t codec, size_t rows, size_t columns) {
    return max_bytes(codec_of(codec), rows, columns);
  });
  module.def(
      "encode_rows",
      [](uint8_t codec, const MatrixTuple& rows, uintptr_t out) {
        const auto& [address, count, columns, stride] = rows;
        return encode(codec_of(codec), matrix<const float>(rows),
                      {pointer(out), max_bytes(codec_of(codec), count, columns)});
      },
      Release());
  module.def(
      "decode_rows",
      [](uint8_t codec, uintptr_t in, size_t bytes, const MatrixTuple& rows) {
        decode(codec_of(codec), {pointer(in), bytes}, matrix<float>(rows));
      },
      Release());
  module.def("usual_frame_bytes", [](const std::vector<TableTuple>& tables) {
    const FrameList<const float> list({tables});
    return usual_frame_bytes(list.frames()[0]);
  });
  module.def("encode_frame", [](const std::vector<TableTuple>& tables, uintptr_t out, size_t room) {
    const FrameList<const float> list({tables});
    const py::gil_scoped_release release;
    return encode_frame(list.frames()[0], {pointer(out), room});
  });
  module.def("decode_frame", [](uintptr_t in, size_t bytes, const std::vector<TableTuple>& tables) {
    const FrameList<float> list({tables});
    const py::gil_scoped_release release;
    decode_frame({pointer(in), bytes}, list.frames()[0]);
  });
  module.def("post_frames",
             [](Channel& channel, const std::vector<std::vector<TableTuple>>& frames, bool summed) {
               const FrameList<const float> list(frames, summed);
               const py::gil_scoped_release release;
               post_frames(channel, list.frames());
             });
  module.def("collect_frames", [](const Arrival& arrival,
                                  const std::vector<std::vector<TableTuple>>& frames, bool summed) {
    const FrameList<float> list(frames, summed);
    const py::gil_scoped_release release;
    collect_frames(arrival, list.frames());
  });
  module.def("instruction_sets", &instruction_sets);
  module.def("use_instruction_set", &use_instruction_set);
}

}  // namespace bls
