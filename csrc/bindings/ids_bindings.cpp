#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensors/jagged_argument.h"
#include "bindings/tensors/tensor_argument.h"
#include "messages/ids/batch_ids.h"
#include "messages/ids/equal_bags.h"
#include "messages/ids/ids_message.h"
#include "messages/ids/row_requests.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (feature, position, id)
using BadIdTuple = std::tuple<int64_t, int64_t, int64_t>;

/// The values of each feature, and a bad id.
std::pair<std::vector<int64_t>, std::optional<BadIdTuple>> check_ids(
    const Tensor& lengths, const Tensor& values, const std::optional<Tensor>& weights,
    size_t stride, const std::vector<int64_t>& rows) {
  const JaggedIds ids = jagged_ids(lengths, values, weights, rows.size(), stride);
  std::vector<int64_t> counts = values_per_feature(ids);
  const auto bad = find_bad_id(ids, rows, counts);
  if (!bad) return {std::move(counts), std::nullopt};
  return {std::move(counts), BadIdTuple(bad->feature, bad->position, bad->id)};
}

/// The reasons come from other ranks and need not be UTF-8.
std::vector<std::pair<int, py::bytes>> refusals_of(const BatchIds& ids) {
  std::vector<std::pair<int, py::bytes>> refusals;
  for (const auto& [rank, reason] : ids.arrived().refusals()) refusals.emplace_back(rank, reason);
  return refusals;
}

/// (bags, ids, whether groups are wanted)
using BagBlockTuple = std::tuple<size_t, size_t, bool>;

/// Without `lengths` each id is a bag of its own.
EqualBags equal_bags(const std::optional<Tensor>& lengths, const Tensor& ids,
                     const std::vector<BagBlockTuple>& tuples) {
  const TensorItems of_ids = items_of(ids, "ids", kInt32 | kInt64);
  const TensorItems of_lengths =
      lengths ? items_of(*lengths, "lengths", kInt32 | kInt64) : TensorItems{};
  std::vector<BagBlock> blocks;
  size_t all_bags = 0, all_ids = 0;
  for (const auto& [bags, in_bags, wanted] : tuples) {
    all_bags += bags;
    all_ids += in_bags;
    blocks.push_back({bags, in_bags, wanted});
  }
  check_count(lengths ? "lengths" : "ids", lengths ? of_lengths.count : of_ids.count, all_bags,
              "items");
  check_count("ids", of_ids.count, all_ids, "items");
  const py::gil_scoped_release release;
  return EqualBags(
      {of_lengths.data, of_lengths.item_bytes, of_ids.data, of_ids.item_bytes, blocks});
}

/// (feature, first row, end)
using AskedBlockTuple = std::tuple<size_t, int64_t, int64_t>;

RowRequests row_requests(size_t features, const std::vector<AskedBlockTuple>& tuples) {
  std::vector<AskedBlock> blocks;
  for (const auto& [feature, first, end] : tuples) blocks.push_back({feature, first, end});
  return {features, std::move(blocks)};
}

AskedRows ask_for(const RowRequests& requests, const Tensor& ids,
                  const std::vector<int64_t>& counts) {
  const TensorItems of_ids = items_of(ids, "ids", kInt32 | kInt64);
  const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  check_count("ids", of_ids.count, static_cast<size_t>(all), "items");
  const py::gil_scoped_release release;
  return requests.ask(of_ids.data, of_ids.item_bytes, counts);
}

/// A property of what arrived.
template <auto kOf>
auto of_arrived(const BatchIds& ids) {
  return (ids.arrived().*kOf)();
}

/// A view that keeps the memory.
py::memoryview view_of(const std::shared_ptr<IdsMemory>& memory) {
  return py::memoryview(py::cast(memory));
}

}  // namespace

void bind_ids(py::module_& module) {
  py::class_<IdsMemory, std::shared_ptr<IdsMemory>>(module, "IdsMemory", py::buffer_protocol())
      .def_buffer([](const IdsMemory& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data.get()),
                               static_cast<py::ssize_t>(memory.bytes));
      });
  py::class_<BatchIds>(module, "BatchIds")
      .def(py::init([](const Arrival& arrival, size_t features, const std::vector<int>& order) {
             const py::gil_scoped_release release;
             return std::make_unique<BatchIds>(arrival, features, order);
           }),
           py::arg("arrival"), py::arg("features"), py::arg("order"))
      .def_property_readonly("length_bytes", &of_arrived<&ArrivedIds::length_bytes>)
      .def_property_readonly("value_bytes", &of_arrived<&ArrivedIds::value_bytes>)
      .def_property_readonly("weight_bytes", &of_arrived<&ArrivedIds::weight_bytes>)
      .def_property_readonly("total_stride", &of_arrived<&ArrivedIds::total_stride>)
      .def_property_readonly("strides", &of_arrived<&ArrivedIds::strides>)
      .def_property_readonly("values_per_source", &of_arrived<&ArrivedIds::values_per_source>)
      .def_property_readonly("counts", &of_arrived<&ArrivedIds::counts>)
      .def_property_readonly("values_per_feature", &of_arrived<&ArrivedIds::values_per_feature>)
      .def_property_readonly("all_ended", &of_arrived<&ArrivedIds::all_ended>)
      .def_property_readonly("updates", &of_arrived<&ArrivedIds::updates>)
      .def_property_readonly("wanted_slot_bytes", &of_arrived<&ArrivedIds::wanted_slot_bytes>)
      .def_property_readonly("refusals", &refusals_of)
      .def_property_readonly("lengths", [](const BatchIds& ids) { return view_of(ids.lengths()); })
      .def_property_readonly("values", [](BatchIds& ids) { return view_of(ids.expose_values()); })
      .def_property_readonly("weights", [](const BatchIds& ids) { return view_of(ids.weights()); });

  py::class_<EqualBags>(module, "EqualBags")
      .def(py::init(&equal_bags), py::arg("lengths"), py::arg("ids"), py::arg("blocks"));

  py::class_<AskedRows>(module, "AskedRows")
      .def_property_readonly("numbers", [](const AskedRows& rows) { return view_of(rows.numbers); })
      .def_property_readonly("rows", [](const AskedRows& rows) { return view_of(rows.rows); })
      .def_readonly("counts", &AskedRows::counts)
      .def_readonly("first_numbers", &AskedRows::first_numbers)
      .def_readonly("distinct", &AskedRows::distinct);
  py::class_<RowRequests>(module, "RowRequests")
      .def(py::init(&row_requests), py::arg("features"), py::arg("blocks"))
      .def_property_readonly("row_bytes", &RowRequests::row_bytes)
      .def("ask", &ask_for, py::arg("ids"), py::arg("counts"));

  module.def(
      "post_ids",
      [](Channel& channel, const Tensor& lengths, const Tensor& values,
         const std::optional<Tensor>& weights, size_t features, size_t stride,
         const std::vector<size_t>& features_per_rank, const std::vector<size_t>& order, bool ended,
         const std::optional<std::string>& refusal, uint64_t updates,
         const std::array<uint64_t, 3>& wanted_slot_bytes) {
        const JaggedIds ids = jagged_ids(lengths, values, weights, features, stride);
        const IdsNote note{ended, refusal, updates, wanted_slot_bytes};
        const py::gil_scoped_release release;
        return post_ids(channel, ids, features_per_rank, order, note);
      },
      py::arg("channel"), py::arg("lengths"), py::arg("values"), py::arg("weights"),
      py::arg("features"), py::arg("stride"), py::arg("features_per_rank"), py::arg("order"),
      py::arg("ended") = false, py::arg("refusal") = std::nullopt, py::arg("updates") = 0,
      py::arg("wanted_slot_bytes") = std::array<uint64_t, 3>{});
  module.def("check_ids", &check_ids, py::arg("lengths"), py::arg("values"), py::arg("weights"),
             py::arg("stride"), py::arg("rows"));
}

}  // namespace bls
