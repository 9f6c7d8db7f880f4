#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "codecs/codec.h"
#include "errors.h"
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

/// (codec, columns, error bound or 0, whether codes have a fixed width)
using FeatureTuple = std::tuple<uint8_t, size_t, float, bool>;

/// How the features of a rank travel. Made once, since a list of tuples takes microseconds to read.
struct CodedFeatures {
  explicit CodedFeatures(const std::vector<FeatureTuple>& tuples) {
    for (const auto& [codec, columns, bound, fixed_width] : tuples) {
      features.push_back({codec_of(codec), columns, bound, fixed_width});
    }
  }

  struct Feature {
    Codec codec;
    size_t columns;
    float bound;
    bool fixed_width;
  };
  std::vector<Feature> features;
};

/// (features; of each its address, rows, and items from one row to the next; of each or of none,
/// address of the group of each row as uint32 or 0, and groups)
using FrameTuple = std::tuple<const CodedFeatures*, std::vector<uintptr_t>, std::vector<size_t>,
                              std::vector<size_t>, std::vector<std::pair<uintptr_t, size_t>>>;

/// The tables of all frames, and which are whose.
template <typename T>
class FrameList {
 public:
  /// `summed`: the rows of a group travel as their sum, in place of the first one.
  explicit FrameList(const std::vector<FrameTuple>& frames, bool summed = false) {
    size_t count = 0;
    for (const auto& frame : frames) count += std::get<0>(frame)->features.size();
    tables_.reserve(count);  // spans point into it
    for (const auto& frame : frames) {
      const size_t first = tables_.size();
      append(frame, summed);
      spans_.emplace_back(tables_.data() + first, tables_.size() - first);
    }
  }
  Frames<T> frames() const { return spans_; }

 private:
  void append(const FrameTuple& frame, bool summed) {
    const auto& [coded, addresses, rows, strides, groups] = frame;
    const auto& features = coded->features;
    for (const size_t found : {addresses.size(), rows.size(), strides.size(),
                               groups.empty() ? features.size() : groups.size()}) {
      if (found == features.size()) continue;
      throw std::invalid_argument("a frame has " + std::to_string(features.size()) +
                                  " features, and something of " + std::to_string(found));
    }
    for (size_t i = 0; i < features.size(); ++i) {
      const auto& feature = features[i];
      FrameTable<T>& table = tables_.emplace_back();
      table.codec = feature.codec;
      table.rows = matrix<T>({addresses[i], rows[i], feature.columns, strides[i]});
      table.bound = feature.bound;
      table.fixed_width = feature.fixed_width;
      if (groups.empty() || groups[i].first == 0) continue;
      const auto& [of_row, count] = groups[i];
      table.groups = {{reinterpret_cast<const uint32_t*>(of_row), rows[i]}, count};
      table.summed = summed;
    }
  }

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
        const size_t used = decode(codec_of(codec), {pointer(in), bytes}, matrix<float>(rows));
        if (used == bytes) return;
        throw ChannelError(ErrorKind::kProtocol,
                           "encoded rows have " + std::to_string(bytes - used) + " bytes too many");
      },
      Release());
  py::class_<CodedFeatures>(module, "CodedFeatures")
      .def(py::init<const std::vector<FeatureTuple>&>());
  module.def("usual_frame_bytes", [](const FrameTuple& frame) {
    const FrameList<const float> list({frame});
    return usual_frame_bytes(list.frames()[0]);
  });
  module.def("encode_frame", [](const FrameTuple& frame, uintptr_t out, size_t room) {
    const FrameList<const float> list({frame});
    const py::gil_scoped_release release;
    return encode_frame(list.frames()[0], {pointer(out), room});
  });
  module.def("decode_frame", [](uintptr_t in, size_t bytes, const FrameTuple& frame) {
    const FrameList<float> list({frame});
    const py::gil_scoped_release release;
    decode_frame({pointer(in), bytes}, list.frames()[0]);
  });
  module.def("post_frames",
             [](Channel& channel, const std::vector<FrameTuple>& frames, bool summed) {
               const FrameList<const float> list(frames, summed);
               const py::gil_scoped_release release;
               post_frames(channel, list.frames());
             });
  module.def("collect_frames",
             [](const Arrival& arrival, const std::vector<FrameTuple>& frames, bool summed) {
               const FrameList<float> list(frames, summed);
               const py::gil_scoped_release release;
               collect_frames(arrival, list.frames());
             });
  module.def("instruction_sets", &instruction_sets);
  module.def("use_instruction_set", &use_instruction_set);
}

}  // namespace bls
