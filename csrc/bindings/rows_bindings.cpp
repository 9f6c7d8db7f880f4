#include <pybind11/numpy.h>
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
#include "host/page_pool.h"
#include "lookup/pooled_rows.h"
#include "lookup/table_rows.h"
#include "messages/ids/arrived_ids.h"
#include "messages/ids/equal_bags.h"
#include "messages/ids/ids_message.h"
#include "messages/row_message.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (address, bytes of an item), or (address, number of items) for a permutation
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
std::vector<std::pair<int, py::bytes>> refusals_of(const ArrivedIds& ids) {
  std::vector<std::pair<int, py::bytes>> refusals;
  for (const auto& [rank, reason] : ids.refusals()) refusals.emplace_back(rank, reason);
  return refusals;
}

/// (address, rows, bytes of a row, whether bags are pooled to means)
using TableTuple = std::tuple<uintptr_t, int64_t, size_t, bool>;

/// Tables of a lookup, by feature. Made once, since a list of tuples takes microseconds to read.
struct Tables {
  explicit Tables(const std::vector<TableTuple>& tuples) {
    for (const auto& [address, rows, bytes, means] : tuples) {
      by_feature.push_back({pointer(address), rows, bytes, means});
      row_bytes += bytes;
    }
  }

  std::vector<Table> by_feature;
  size_t row_bytes = 0;  ///< of one row of each feature
};

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

Lookup lookup_of(std::span<const Table> tables, const Items& ids, size_t count) {
  return {tables, pointer(std::get<0>(ids)), std::get<1>(ids), count};
}

/// (first rank, ranks, offset of the columns in bytes, width in bytes)
using GroupTuple = std::tuple<int, int, size_t, size_t>;

std::vector<ColumnGroup> column_groups(const std::vector<GroupTuple>& tuples) {
  std::vector<ColumnGroup> groups;
  for (const auto& [first, count, offset, width] : tuples) {
    groups.push_back({first, count, offset, width});
  }
  return groups;
}

}  // namespace

void bind_rows(py::module_& module) {
  py::class_<PagePool, std::shared_ptr<PagePool>>(module, "PagePool")
      .def(py::init([](size_t unused) { return PagePool::make(unused); }), py::arg("unused"))
      .def("take",
           [](PagePool& pool, size_t bytes) { return py::memoryview(py::cast(pool.take(bytes))); });
  py::class_<PagePool::Block>(module, "Pages", py::buffer_protocol())
      .def_buffer([](const PagePool::Block& block) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(block.data()),
                               static_cast<py::ssize_t>(block.bytes()));
      });

  py::class_<ArrivedIds>(module, "ArrivedIds")
      .def(py::init([](const Arrival& arrival, size_t features, const std::vector<int>& order) {
             return std::make_unique<ArrivedIds>(arrival, features, order);
           }),
           py::keep_alive<1, 2>())
      .def_property_readonly("length_bytes", &ArrivedIds::length_bytes)
      .def_property_readonly("value_bytes", &ArrivedIds::value_bytes)
      .def_property_readonly("weight_bytes", &ArrivedIds::weight_bytes)
      .def_property_readonly("total_stride", &ArrivedIds::total_stride)
      .def_property_readonly("total_values", &ArrivedIds::total_values)
      .def_property_readonly("strides", &ArrivedIds::strides)
      .def_property_readonly("values_per_source", &ArrivedIds::values_per_source)
      .def_property_readonly("counts", &ArrivedIds::counts)
      .def_property_readonly("values_per_feature", &ArrivedIds::values_per_feature)
      .def_property_readonly("all_ended", &ArrivedIds::all_ended)
      .def_property_readonly("updates", &ArrivedIds::updates)
      .def_property_readonly("wanted_slot_bytes", &ArrivedIds::wanted_slot_bytes)
      .def_property_readonly("refusals", &refusals_of)
      .def("assemble",
           [](const ArrivedIds& ids, uintptr_t lengths, uintptr_t values, uintptr_t weights) {
             const py::gil_scoped_release release;
             ids.assemble(pointer(lengths), pointer(values), pointer(weights));
           });

  py::class_<EqualBags>(module, "EqualBags")
      .def(py::init(&equal_bags))
      .def_property_readonly("groups", &groups_of);

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

  module.def("post_grouped_rows",
             [](Channel& channel, uintptr_t data, size_t row_bytes,
                const std::vector<int64_t>& counts, const std::vector<int>& order, bool to_self) {
               const py::gil_scoped_release release;
               post_grouped_rows(channel, pointer(data), {row_bytes, counts, order}, to_self);
             });
  py::class_<Tables>(module, "Tables")
      .def(py::init<const std::vector<TableTuple>&>())
      .def_readonly("row_bytes", &Tables::row_bytes);
  module.def(
      "post_table_rows",
      [](Channel& channel, const Tables& tables, const Items& ids, size_t count, size_t row_bytes,
         const std::vector<int64_t>& counts, const std::vector<int>& order, uintptr_t own) {
        const TableRows rows{lookup_of(tables.by_feature, ids, count), {row_bytes, counts, order}};
        const py::gil_scoped_release release;
        post_table_rows(channel, rows, pointer(own));
      });
  module.def(
      "post_pooled_rows", [](Channel& channel, const Tables& tables, const Items& ids, size_t count,
                             const Items& lengths, size_t length_count, uintptr_t weights,
                             const std::vector<int64_t>& batches, const std::vector<int>& order,
                             uintptr_t own, size_t own_stride) {
        const auto& [address, length_bytes] = lengths;
        const PooledRows rows{
            lookup_of(tables.by_feature, ids, count), pointer(address), length_bytes, length_count,
            reinterpret_cast<const float*>(weights),  batches,          order};
        const py::gil_scoped_release release;
        post_pooled_rows(channel, rows, {pointer(own), own_stride});
      });
  module.def(
      "sum_rows", [](const Tables& tables, const Items& ids, size_t count, const Items& lengths,
                     size_t length_count, uintptr_t weights, const std::vector<int64_t>& batches,
                     const std::vector<int>& order, uintptr_t out) {
        const auto& [address, length_bytes] = lengths;
        const PooledRows rows{
            lookup_of(tables.by_feature, ids, count), pointer(address), length_bytes, length_count,
            reinterpret_cast<const float*>(weights),  batches,          order};
        const py::gil_scoped_release release;
        sum_rows(rows, pointer(out));
      });
  module.def("copy_table_rows", [](const Tables& tables, const Items& ids, size_t count,
                                   size_t row_bytes, const std::vector<int64_t>& counts,
                                   const std::vector<int>& order, uintptr_t out) {
    const TableRows rows{lookup_of(tables.by_feature, ids, count), {row_bytes, counts, order}};
    const py::gil_scoped_release release;
    copy_table_rows(rows, pointer(out));
  });
  module.def("collect_grouped_rows",
             [](const Arrival& arrival, uintptr_t out, size_t row_bytes,
                const std::vector<int64_t>& counts, const std::vector<int>& order) {
               const py::gil_scoped_release release;
               collect_grouped_rows(arrival, pointer(out), {row_bytes, counts, order});
             });
  module.def("collect_rows", [](const Arrival& arrival, uintptr_t out, size_t row_bytes,
                                const std::vector<int64_t>& rows_per_source,
                                const Items& permutation, int rank, uintptr_t own_rows,
                                const std::vector<int64_t>& counts, const std::vector<int>& order) {
    const auto& [address, length] = permutation;
    const std::span<const int64_t> indices(reinterpret_cast<const int64_t*>(address), length);
    const py::gil_scoped_release release;
    collect_rows(arrival, pointer(out), row_bytes, rows_per_source, indices,
                 {rank, pointer(own_rows), {row_bytes, counts, order}});
  });
  module.def("collect_columns", [](const Arrival& arrival, uintptr_t out, size_t rows,
                                   size_t out_row_bytes, const std::vector<GroupTuple>& groups) {
    const std::vector<ColumnGroup> list = column_groups(groups);
    const py::gil_scoped_release release;
    collect_columns(arrival, pointer(out), rows, out_row_bytes, list);
  });
}

}  // namespace bls
