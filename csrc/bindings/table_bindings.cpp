#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensors/tensor_argument.h"
#include "lookup/kernels/dot_products.h"
#include "lookup/pooled_rows.h"
#include "lookup/table_rows.h"
#include "messages/ids/batch_ids.h"

namespace py = pybind11;

namespace bls {
namespace {

/// Tables of a lookup, by feature, whose memory they keep. Made once, since a list of tuples takes
/// microseconds to read.
struct Tables {
  /// Of each feature its table, and whether bags are pooled to means.
  explicit Tables(const std::vector<std::pair<Tensor, bool>>& tables) {
    for (const auto& [table, means] : tables) {
      const TensorRows rows = rows_of(table, "a table", kAnyDtype);
      add(table, {rows.data, static_cast<int64_t>(rows.rows), rows.row_bytes(), means});
      floats &= rows.dtype == kFloat32;
    }
  }

  /// Rows as they are stored: of each feature its table, and the bytes of a row before the padding.
  static Tables stored(const std::vector<std::pair<Tensor, size_t>>& tables) {
    Tables found({});
    for (const auto& [table, bytes] : tables) {
      const TensorRows rows = rows_of(table, "a table", kUint8);
      check_end("a row", rows.columns, 0, bytes, "bytes");
      found.add(table,
                {rows.data, static_cast<int64_t>(rows.rows), bytes, false, rows.stride_bytes()});
      found.floats = false;
    }
    return found;
  }

  void add(const Tensor& tensor, const Table& table) {
    by_feature.push_back(table);
    row_bytes += table.row_bytes;
    owners.push_back(tensor);
  }

  std::vector<Table> by_feature;
  size_t row_bytes = 0;  ///< of one row of each feature
  bool floats = true;    ///< whether all rows are float32
  std::vector<py::object> owners;
};

Lookup lookup_of(const Tables& tables, const BatchIds& ids) {
  const ArrivedIds& arrived = ids.arrived();
  return {tables.by_feature, ids.values()->data.get(), arrived.value_bytes(),
          static_cast<size_t>(arrived.total_values()), ids.largest()};
}

TableRows table_rows(const Tables& tables, const BatchIds& ids, size_t row_bytes) {
  return {lookup_of(tables, ids), {row_bytes, ids.arrived().counts(), ids.arrived().order()}};
}

/// Throws std::invalid_argument unless there are no weights, or such that may be floats, and for
/// tables of other numbers.
PooledRows pooled_rows(const Tables& tables, const BatchIds& ids) {
  if (!tables.floats) throw std::invalid_argument("only tables of torch.float32 can be pooled");
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

/// How many rows a rank has asked for.
size_t rows_for(int rank, const BatchIds& ids) {
  const ArrivedIds& arrived = ids.arrived();
  const size_t world = arrived.order().size();
  size_t rows = 0;
  for (size_t i = 0; i < arrived.counts().size(); ++i) {
    if (arrived.order()[i % world] == rank) rows += static_cast<size_t>(arrived.counts()[i]);
  }
  return rows;
}

void dot_products(const Tensor& first, const Tensor& others, const Tensor& out) {
  const TensorRows of_first = rows_of(first, "first", kFloat32);
  const TensorItems of_others = items_of(others, "others", kFloat32);
  const TensorRows to = rows_of(out, "out", kFloat32);
  const size_t values = of_first.rows * of_first.columns;
  const size_t count = values > 0 ? of_others.count / values : 0;
  check_count("others", of_others.count, values * count, "items");
  check_rows("out", to, of_first.rows);
  if (of_first.rows == 0) return;
  check_count("out", to.columns, of_first.columns + count * (count + 1) / 2, "columns");
  const Rows rows{of_first.as<float>(), of_others.as<float>(), of_first.rows, count,
                  of_first.columns};
  const py::gil_scoped_release release;
  dot_products(rows, to.as<float>());
}

}  // namespace

void bind_tables(py::module_& module) {
  module.def("dot_products",
             py::overload_cast<const Tensor&, const Tensor&, const Tensor&>(&dot_products),
             py::arg("first"), py::arg("others"), py::arg("out"));
  py::class_<Tables>(module, "Tables")
      .def(py::init<const std::vector<std::pair<Tensor, bool>>&>(), py::arg("tables"))
      .def_static("stored", &Tables::stored, py::arg("tables"))
      .def_readonly("row_bytes", &Tables::row_bytes);
  // This rank's rows for itself go to `own`, from its row `first` on.
  module.def(
      "post_table_rows",
      [](Channel& channel, const Tables& tables, const BatchIds& ids, const Tensor& own,
         size_t first) {
        const TensorRows to = rows_of(own, "own", kAnyDtype);
        check_end("own", to.rows, first, rows_for(channel.config().rank, ids), "rows");
        const py::gil_scoped_release release;
        post_table_rows(channel, table_rows(tables, ids, to.row_bytes()), to.row(first));
      },
      py::arg("channel"), py::arg("tables"), py::arg("ids"), py::arg("own"), py::arg("first"));
  module.def(
      "post_stored_rows",
      [](Channel& channel, const Tables& tables, const BatchIds& ids) {
        const py::gil_scoped_release release;
        post_stored_rows(channel, table_rows(tables, ids, 0));
      },
      py::arg("channel"), py::arg("tables"), py::arg("ids"));
  module.def(
      "copy_table_rows",
      [](const Tables& tables, const BatchIds& ids, const Tensor& out) {
        const TensorRows to = rows_of(out, "out", kAnyDtype);
        check_rows("out", to, static_cast<size_t>(ids.arrived().total_values()));
        const py::gil_scoped_release release;
        copy_table_rows(table_rows(tables, ids, to.row_bytes()), to.data);
      },
      py::arg("tables"), py::arg("ids"), py::arg("out"));
  // This rank's sums for itself go to `own`, from its column `first` on; without it into a slot.
  module.def(
      "post_pooled_rows",
      [](Channel& channel, const Tables& tables, const BatchIds& ids,
         const std::optional<Tensor>& own, size_t first) {
        OwnSums to;
        if (own) {
          const TensorRows rows = rows_of(*own, "own", kFloat32);
          const auto rank = static_cast<size_t>(channel.config().rank);
          check_rows("own", rows, static_cast<size_t>(ids.arrived().strides().at(rank)));
          check_end("own", rows.columns, first, tables.row_bytes / rows.item_bytes, "columns");
          to = {rows.data + first * rows.item_bytes, rows.row_bytes()};
        }
        const py::gil_scoped_release release;
        post_pooled_rows(channel, pooled_rows(tables, ids), to);
      },
      py::arg("channel"), py::arg("tables"), py::arg("ids"), py::arg("own"), py::arg("first") = 0);
  module.def(
      "sum_rows",
      [](const Tables& tables, const BatchIds& ids, const Tensor& out) {
        const TensorRows to = rows_of(out, "out", kFloat32);
        check_rows("out", to, static_cast<size_t>(ids.arrived().total_stride()));
        check_count("out", to.columns, tables.row_bytes / to.item_bytes, "columns");
        const py::gil_scoped_release release;
        sum_rows(pooled_rows(tables, ids), to.data);
      },
      py::arg("tables"), py::arg("ids"), py::arg("out"));
}

}  // namespace bls
