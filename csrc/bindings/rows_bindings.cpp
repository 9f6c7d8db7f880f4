#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "host/page_pool.h"
#include "lookup/pooled_rows.h"
#include "lookup/table_rows.h"
#include "messages/ids/batch_ids.h"
#include "messages/rows/row_message.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (address, number of items)
using Permutation = std::tuple<uintptr_t, size_t>;

/// (address, rows, bytes of a row, whether bags are pooled to means)
using TableTuple = std::tuple<uintptr_t, int64_t, size_t, bool>;
/// (address, rows, bytes of a row, from row to row)
using StoredTableTuple = std::tuple<uintptr_t, int64_t, size_t, size_t>;
/// (offset in bytes, rows, bytes of a row, from row to row)
using PlacedTuple = std::tuple<size_t, size_t, size_t, size_t>;

/// Tables of a lookup, by feature. Made once, since a list of tuples takes microseconds to read.
struct Tables {
  explicit Tables(const std::vector<TableTuple>& tuples) {
    for (const auto& [address, rows, bytes, means] : tuples) {
      by_feature.push_back({pointer(address), rows, bytes, means});
      row_bytes += bytes;
    }
  }

  static Tables stored(const std::vector<StoredTableTuple>& tuples) {
    Tables tables({});
    for (const auto& [address, rows, bytes, pitch] : tuples) {
      tables.by_feature.push_back({pointer(address), rows, bytes, false, pitch});
      tables.row_bytes += bytes;
    }
    return tables;
  }

  std::vector<Table> by_feature;
  size_t row_bytes = 0;  ///< of one row of each feature
};

Lookup lookup_of(const Tables& tables, const BatchIds& ids) {
  const ArrivedIds& arrived = ids.arrived();
  return {tables.by_feature, ids.values()->data.get(), arrived.value_bytes(),
          static_cast<size_t>(arrived.total_values()), ids.largest()};
}

TableRows table_rows(const Tables& tables, const BatchIds& ids, size_t row_bytes) {
  return {lookup_of(tables, ids), {row_bytes, ids.arrived().counts(), ids.arrived().order()}};
}

/// Throws std::invalid_argument unless there are no weights, or such that may be floats.
PooledRows pooled_rows(const Tables& tables, const BatchIds& ids) {
  const ArrivedIds& arrived = ids.arrived();
  const size_t weight_bytes = arrived.weight_bytes();
  if (weight_bytes != 0 && weight_bytes != sizeof(float)) {
    throw std::invalid_argument("weights of " + std::to_string(weight_bytes) +
                                " bytes are no floats");
  }
  const auto* weights = reinterpret_cast<const float*>(ids.weights()->data.get());
  return {lookup_of(tables, ids),
          ids.lengths()->data.get(),
          arrived.length_bytes(),
          arrived.features() * static_cast<size_t>(arrived.total_stride()),
          weight_bytes == 0 ? nullptr : weights,
          ids.batches(),
          arrived.order()};
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

  module.def("post_grouped_rows",
             [](Channel& channel, uintptr_t data, size_t row_bytes,
                const std::vector<int64_t>& counts, const std::vector<int>& order, bool to_self) {
               const py::gil_scoped_release release;
               post_grouped_rows(channel, pointer(data), {row_bytes, counts, order}, to_self);
             });
  py::class_<Tables>(module, "Tables")
      .def(py::init<const std::vector<TableTuple>&>())
      .def_static("stored", &Tables::stored)
      .def_readonly("row_bytes", &Tables::row_bytes);
  module.def("post_table_rows", [](Channel& channel, const Tables& tables, const BatchIds& ids,
                                   size_t row_bytes, uintptr_t own) {
    const py::gil_scoped_release release;
    post_table_rows(channel, table_rows(tables, ids, row_bytes), pointer(own));
  });
  module.def("post_stored_rows", [](Channel& channel, const Tables& tables, const BatchIds& ids) {
    const py::gil_scoped_release release;
    post_stored_rows(channel, table_rows(tables, ids, 0));
  });
  module.def("copy_table_rows",
             [](const Tables& tables, const BatchIds& ids, size_t row_bytes, uintptr_t out) {
               const py::gil_scoped_release release;
               copy_table_rows(table_rows(tables, ids, row_bytes), pointer(out));
             });
  module.def("post_pooled_rows", [](Channel& channel, const Tables& tables, const BatchIds& ids,
                                    uintptr_t own, size_t own_stride) {
    const py::gil_scoped_release release;
    post_pooled_rows(channel, pooled_rows(tables, ids), {pointer(own), own_stride});
  });
  module.def("sum_rows", [](const Tables& tables, const BatchIds& ids, uintptr_t out) {
    const py::gil_scoped_release release;
    sum_rows(pooled_rows(tables, ids), pointer(out));
  });
  module.def("collect_grouped_rows",
             [](const Arrival& arrival, uintptr_t out, size_t row_bytes,
                const std::vector<int64_t>& counts, const std::vector<int>& order) {
               const py::gil_scoped_release release;
               collect_grouped_rows(arrival, pointer(out), {row_bytes, counts, order});
             });
  module.def("collect_rows", [](const Arrival& arrival, uintptr_t out, size_t row_bytes,
                                const std::vector<int64_t>& rows_per_source,
                                const Permutation& permutation, int rank, uintptr_t own_rows,
                                const std::vector<int64_t>& counts, const std::vector<int>& order) {
    const auto& [address, length] = permutation;
    const std::span<const int64_t> indices(reinterpret_cast<const int64_t*>(address), length);
    const py::gil_scoped_release release;
    collect_rows(arrival, pointer(out), row_bytes, rows_per_source, indices,
                 {rank, pointer(own_rows), {row_bytes, counts, order}});
  });
  module.def("collect_placed_rows", [](const Arrival& arrival, uintptr_t out, size_t out_bytes,
                                       const std::vector<PlacedTuple>& tuples,
                                       const std::vector<size_t>& blocks_per_source) {
    std::vector<PlacedRows> placed;
    for (const auto& [offset, rows, bytes, pitch] : tuples) {
      placed.push_back({offset, rows, bytes, pitch});
    }
    const py::gil_scoped_release release;
    collect_placed_rows(arrival, pointer(out), out_bytes, placed, blocks_per_source);
  });
  module.def("collect_columns", [](const Arrival& arrival, uintptr_t out, size_t rows,
                                   size_t out_row_bytes, const std::vector<GroupTuple>& groups) {
    const std::vector<ColumnGroup> list = column_groups(groups);
    const py::gil_scoped_release release;
    collect_columns(arrival, pointer(out), rows, out_row_bytes, list);
  });
}

}  // namespace bls
