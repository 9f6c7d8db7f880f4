#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/codec_number.h"
#include "bindings/tensors/tensor_argument.h"
#include "messages/frame_message.h"
#include "messages/ids/equal_bags.h"

namespace py = pybind11;

namespace bls {
namespace {

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
  std::vector<int64_t> blocks_;  ///< of `equal_`, by feature; below 0 where nothing is known
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

/// Returns the bytes of a frame, and writes it to `out` where that has so many.
size_t encode_frame_to(const Frame& frame, const std::optional<Tensor>& out) {
  const FrameList<const float> list({&frame});
  const TensorItems to = out ? items_of(*out, "out", kUint8) : TensorItems{};
  const py::gil_scoped_release release;
  return encode_frame(list.frames()[0], {to.data, to.count});
}

}  // namespace

void bind_frames(py::module_& module) {
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
}

}  // namespace bls
