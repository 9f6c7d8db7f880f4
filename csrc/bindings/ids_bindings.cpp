#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "messages/ids/batch_ids.h"
#include "messages/ids/equal_bags.h"
#include "messages/ids/ids_message.h"
#include "messages/ids/row_requests.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (address, bytes of an item)
using Items = std::tuple<uintptr_t, size_t>;

JaggedIds jagged_ids(const Items& lengths, const Items& values, const Items& weights,
                     size_t features, size_t stride, size_t count) {
  return {pointer(std::get<0>(lengths)),
          std::get<1>(lengths),
          pointer(std::get<0>(values)),
          std::get<1>(values),
          pointer(std::get<0>(weights)),
          std::get<1>(weights),
          features,
          stride,
          count};
}

/// (feature, position, id)
using BadIdTuple = std::tuple<int64_t, int64_t, int64_t>;

/// The values of each feature, and a bad id.
std::pair<std::vector<int64_t>, std::optional<BadIdTuple>> check_ids(
    const Items& lengths, const Items& values, size_t stride, size_t count,
    const std::vector<int64_t>& rows) {
  const JaggedIds ids = jagged_ids(lengths, values, {0, 0}, rows.size(), stride, count);
  std::vector<int64_t> counts = values_per_feature(ids);
  const auto bad = find_bad_id(ids, rows, counts);
  if (!bad) return {std::move(counts), std::nullopt};
  return {std::move(counts), BadIdTuple(bad->feature, bad->position, bad->id)};
}

/// (ended, refusal, updates, wanted slot bytes)
using NoteTuple = std::tuple<bool, std::optional<std::string>, uint64_t, std::array<uint64_t, 3>>;

/// The reasons come from other ranks and need not be UTF-8.
std::vector<std::pair<int, py::bytes>> refusals_of(const BatchIds& ids) {
  std::vector<std::pair<int, py::bytes>> refusals;
  for (const auto& [rank, reason] : ids.arrived().refusals()) refusals.emplace_back(rank, reason);
  return refusals;
}

/// (bags, ids, whether groups are wanted)
using BagBlockTuple = std::tuple<size_t, size_t, bool>;

/// Counts are those of the tensors, which the blocks have to fit into.
EqualBags equal_bags(const Items& lengths, size_t bag_count, const Items& ids, size_t id_count,
                     const std::vector<BagBlockTuple>& tuples) {
  std::vector<BagBlock> blocks;
  for (const auto& [bags, of_ids, wanted] : tuples) {
    if (bags > bag_count || of_ids > id_count) {
      throw std::invalid_argument("there are fewer bags or ids than blocks of them need");
    }
    bag_count -= bags;
    id_count -= of_ids;
    blocks.push_back({bags, of_ids, wanted});
  }
  const py::gil_scoped_release release;
  return EqualBags({pointer(std::get<0>(lengths)), std::get<1>(lengths), pointer(std::get<0>(ids)),
                    std::get<1>(ids), blocks});
}

/// (address of the group of each bag as uint32 or 0, groups)
std::vector<std::pair<uintptr_t, size_t>> groups_of(const EqualBags& bags) {
  std::vector<std::pair<uintptr_t, size_t>> groups;
  for (size_t block = 0; block < bags.blocks(); ++block) {
    const RowGroups& known = bags.of(block);
    groups.emplace_back(reinterpret_cast<uintptr_t>(known.of_row.data()), known.count);
  }
  return groups;
}

/// (feature, first row, end)
using AskedBlockTuple = std::tuple<size_t, int64_t, int64_t>;

RowRequests row_requests(size_t features, const std::vector<AskedBlockTuple>& tuples) {
  std::vector<AskedBlock> blocks;
  for (const auto& [feature, first, end] : tuples) blocks.push_back({feature, first, end});
  return {features, std::move(blocks)};
}

/// `counts` must be those of the ids.
AskedRows ask_for(const RowRequests& requests, const Items& ids,
                  const std::vector<int64_t>& counts) {
  const py::gil_scoped_release release;
  return requests.ask(pointer(std::get<0>(ids)), std::get<1>(ids), counts);
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
      }))
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
      .def(py::init(&equal_bags))
      .def_property_readonly("groups", &groups_of);

  py::class_<AskedRows>(module, "AskedRows")
      .def_property_readonly("numbers", [](const AskedRows& rows) { return view_of(rows.numbers); })
      .def_property_readonly("rows", [](const AskedRows& rows) { return view_of(rows.rows); })
      .def_readonly("counts", &AskedRows::counts)
      .def_readonly("first_numbers", &AskedRows::first_numbers)
      .def_readonly("distinct", &AskedRows::distinct);
  py::class_<RowRequests>(module, "RowRequests")
      .def(py::init(&row_requests))
      .def_property_readonly("row_bytes", &RowRequests::row_bytes)
      .def("ask", &ask_for);

  module.def("post_ids", [](Channel& channel, const Items& lengths, const Items& values,
                            const Items& weights, size_t features, size_t stride, size_t count,
                            const std::vector<size_t>& features_per_rank,
                            const std::vector<size_t>& order, const NoteTuple& tuple) {
    const JaggedIds ids = jagged_ids(lengths, values, weights, features, stride, count);
    const auto& [ended, refusal, updates, wanted] = tuple;
    const IdsNote note{ended, refusal, updates, wanted};
    const py::gil_scoped_release release;
    return post_ids(channel, ids, features_per_rank, order, note);
  });
  module.def("check_ids", &check_ids);
}

}  // namespace bls
