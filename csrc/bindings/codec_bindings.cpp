#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensors/tensor_argument.h"
#include "codecs/codec.h"
#include "errors.h"
#include "host/instruction_set.h"
#include "messages/frame_message.h"
#include "messages/ids/equal_bags.h"

namespace py = pybind11;

namespace bls {
namespace {

template <typename T>
Matrix<T> matrix(const TensorRows& rows) {
  return {rows.as<T>(), rows.rows, rows.columns, rows.stride};
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

/// What goes to a rank, or comes from it: the features of a rank, and where the rows of each lie in
/// a tensor of float32. It keeps all that it names, and reads the tensor when it is used.
class Frame {
 public:
  Frame() = default;

  /// Features side by side: `count` rows from `first_row` on, and the columns of all features from
  /// `first_column` on.
  static Frame side_by_side(const CodedFeatures* features, const Tensor& rows, size_t first_row,
                            size_t count, size_t first_column, const EqualBags* equal,
                            const std::vector<int64_t>& blocks) {
    Frame frame(features, rows, equal, blocks);
    for (const auto& feature : features->features) {
      frame.places_.push_back({first_row, count, first_column});
      first_column += feature.columns;
    }
    return frame;
  }

  /// Features one below the other: of each its first row, and how many.
  static Frame one_below_another(const CodedFeatures* features, const Tensor& rows,
                                 const std::vector<size_t>& first_rows,
                                 const std::vector<size_t>& counts, const EqualBags* equal,
                                 const std::vector<int64_t>& blocks) {
    Frame frame(features, rows, equal, blocks);
    check_count("first_rows", first_rows.size(), features->features.size(), "items");
    check_count("counts", counts.size(), features->features.size(), "items");
    for (size_t i = 0; i < counts.size(); ++i) {
      frame.places_.push_back({first_rows[i], counts[i], 0});
    }
    return frame;
  }

  size_t features() const { return places_.size(); }

  /// Adds the tables without their memory. `summed`: the rows of a group travel as their sum, in
  /// place of the first one.
  template <typename T>
  void append_shapes(std::vector<FrameTable<T>>& tables, bool summed) const {
    for (size_t i = 0; i < places_.size(); ++i) {
      const auto& feature = coded_->features[i];
      FrameTable<T>& table = tables.emplace_back();
      table.codec = feature.codec;
      table.rows = {nullptr, places_[i].rows, feature.columns, 0};
      table.bound = feature.bound;
      table.fixed_width = feature.fixed_width;
      if (blocks_.empty() || blocks_[i] < 0) continue;
      table.groups = equal_->of(static_cast<size_t>(blocks_[i]));
      table.summed = summed;
      if (!table.groups.known()) continue;
      check_count("a block of equal rows", table.groups.of_row.size(), places_[i].rows, "rows");
    }
  }

  /// Gives the tables that `append_shapes` added their memory.
  template <typename T>
  void place(std::span<FrameTable<T>> tables) const {
    if (places_.empty()) return;
    const TensorRows rows = rows_apart_of(rows_, "rows", kFloat32);
    for (size_t i = 0; i < places_.size(); ++i) {
      const auto& [first_row, count, first_column] = places_[i];
      check_end("rows", rows.rows, first_row, count, "rows");
      check_end("rows", rows.columns, first_column, tables[i].rows.columns, "columns");
      tables[i].rows.data = reinterpret_cast<T*>(rows.row(first_row)) + first_column;
      tables[i].rows.stride = rows.stride;
    }
  }

 private:
  struct Place {
    size_t first_row, rows, first_column;
  };

  Frame(const CodedFeatures* features, const Tensor& rows, const EqualBags* equal,
        const std::vector<int64_t>& blocks)
      : coded_(features), equal_(equal), blocks_(blocks), rows_(rows) {
    owners_ = py::make_tuple(py::cast(features), py::cast(equal));
    if (blocks.empty()) return;
    check_count("blocks", blocks.size(), features->features.size(), "items");
    const size_t known = equal == nullptr ? 0 : equal->blocks();
    for (const int64_t block : blocks) {
      if (block >= 0) check_end("equal", known, static_cast<size_t>(block), 1, "blocks");
    }
  }

  const CodedFeatures* coded_ = nullptr;
  const EqualBags* equal_ = nullptr;
  std::vector<int64_t>
      blocks_;  ///< of `equal_`, one of each feature, below 0 where nothing is known
  std::vector<Place> places_;
  Tensor rows_;
  py::tuple owners_;
};

/// The tables of all frames, and which are whose.
template <typename T>
class FrameList {
 public:
  explicit FrameList(const std::vector<const Frame*>& frames, bool summed = false) {
    size_t count = 0;
    for (const Frame* frame : frames) {
      if (frame == nullptr) throw py::type_error("a frame is None");
      count += frame->features();
    }
    tables_.reserve(count);  // spans point into it
    for (const Frame* frame : frames) {
      const size_t first = tables_.size();
      frame->append_shapes(tables_, summed);
      const std::span of_frame(tables_.data() + first, tables_.size() - first);
      frame->place(of_frame);
      spans_.push_back(of_frame);
    }
  }
  Frames<T> frames() const { return spans_; }

 private:
  std::vector<FrameTable<T>> tables_;
  std::vector<std::span<const FrameTable<T>>> spans_;
};

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

/// Returns the bytes of a frame, and writes it to `out` where that has so many.
size_t encode_frame_to(const Frame& frame, const std::optional<Tensor>& out) {
  const FrameList<const float> list({&frame});
  const TensorItems to = out ? items_of(*out, "out", kUint8) : TensorItems{};
  const py::gil_scoped_release release;
  return encode_frame(list.frames()[0], {to.data, to.count});
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
  py::class_<CodedFeatures>(module, "CodedFeatures")
      .def(py::init<const std::vector<FeatureTuple>&>(), py::arg("features"));
  py::class_<Frame>(module, "Frame")
      .def(py::init<>())
      .def_static("side_by_side", &Frame::side_by_side, py::arg("features").none(false),
                  py::arg("rows"), py::arg("first_row"), py::arg("count"),
                  py::arg("first_column") = 0, py::arg("equal") = nullptr,
                  py::arg("blocks") = std::vector<int64_t>())
      .def_static("one_below_another", &Frame::one_below_another, py::arg("features").none(false),
                  py::arg("rows"), py::arg("first_rows"), py::arg("counts"),
                  py::arg("equal") = nullptr, py::arg("blocks") = std::vector<int64_t>());
  module.def(
      "usual_frame_bytes",
      [](const Frame& frame) {
        std::vector<FrameTable<const float>> tables;
        frame.append_shapes(tables, false);
        return usual_frame_bytes(tables);
      },
      py::arg("frame"));
  module.def("encode_frame", &encode_frame_to, py::arg("frame"), py::arg("out") = std::nullopt);
  module.def(
      "decode_frame",
      [](const Tensor& data, const Frame& frame) {
        const TensorItems from = items_of(data, "data", kUint8);
        const FrameList<float> list({&frame});
        const py::gil_scoped_release release;
        decode_frame({from.data, from.count}, list.frames()[0]);
      },
      py::arg("data"), py::arg("frame"));
  module.def(
      "post_frames",
      [](Channel& channel, const std::vector<const Frame*>& frames, bool summed) {
        const FrameList<const float> list(frames, summed);
        const py::gil_scoped_release release;
        post_frames(channel, list.frames());
      },
      py::arg("channel"), py::arg("frames"), py::arg("summed"));
  module.def(
      "collect_frames",
      [](const Arrival& arrival, const std::vector<const Frame*>& frames, bool summed) {
        const FrameList<float> list(frames, summed);
        const py::gil_scoped_release release;
        collect_frames(arrival, list.frames());
      },
      py::arg("arrival"), py::arg("frames"), py::arg("summed"));
  module.def("instruction_sets", &instruction_sets);
  module.def("use_instruction_set", &use_instruction_set, py::arg("name"));
}

}  // namespace bls
