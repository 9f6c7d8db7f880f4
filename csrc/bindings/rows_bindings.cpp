#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensors/tensor_argument.h"
#include "host/page_pool.h"
#include "lookup/pooled_rows.h"
#include "lookup/table_rows.h"
#include "messages/ids/batch_ids.h"
#include "messages/message_builder.h"
#include "messages/rows/row_message.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (offset in bytes, rows, bytes of a row, from row to row)
using PlacedTuple = std::tuple<size_t, size_t, size_t, size_t>;

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

size_t sum_of(std::span<const int64_t> counts) {
  return static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
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

/// The columns of a pooled output, by the ranks that they come from, in the order of the ranks.
/// Made once, as Tables are.
struct ColumnGroups {
  /// (first rank, ranks, first column, columns)
  using GroupTuple = std::tuple<int, int, size_t, size_t>;

  explicit ColumnGroups(const std::vector<GroupTuple>& tuples) {
    for (const auto& [first, count, offset, width] : tuples) {
      in_columns.push_back({first, count, offset, width});
      end = std::max(end, offset + width);
      most_terms = std::max(most_terms, count);
      end_rank = std::max(end_rank, first + count);
    }
  }

  std::vector<ColumnGroup> in_bytes(size_t item_bytes) const {
    std::vector<ColumnGroup> groups = in_columns;
    for (ColumnGroup& group : groups) {
      group.offset_bytes *= item_bytes;
      group.width_bytes *= item_bytes;
    }
    return groups;
  }

  std::vector<ColumnGroup> in_columns;  ///< with columns in place of bytes
  size_t end = 0;                       ///< of the columns
  int most_terms = 0;                   ///< ranks whose columns are added up
  int end_rank = 0;
};

/// Rows without columns take no memory, however many there are.
void check_rows(const char* name, const TensorRows& rows, size_t must_be) {
  if (rows.row_bytes() != 0) check_count(name, rows.rows, must_be, "rows");
}

void check_order(const std::vector<int64_t>& counts, const std::vector<int>& order) {
  if (!order.empty() && counts.size() % order.size() == 0) return;
  throw std::invalid_argument(std::to_string(counts.size()) + " counts for " +
                              std::to_string(order.size()) + " ranks");
}

}  // namespace

void bind_rows(py::module_& module) {
  py::class_<PagePool, std::shared_ptr<PagePool>>(module, "PagePool")
      .def(py::init([](size_t unused) { return PagePool::make(unused); }), py::arg("unused"))
      .def(
          "take",
          [](PagePool& pool, size_t bytes) { return py::memoryview(py::cast(pool.take(bytes))); },
          py::arg("bytes"));
  py::class_<PagePool::Block>(module, "Pages", py::buffer_protocol())
      .def_buffer([](const PagePool::Block& block) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(block.data()),
                               static_cast<py::ssize_t>(block.bytes()));
      });

  module.def(
      "post_grouped_rows",
      [](Channel& channel, const Tensor& rows, const std::vector<int64_t>& counts,
         const std::vector<int>& order, bool to_self) {
        const TensorRows from = rows_of(rows, "rows", kAnyDtype);
        check_order(counts, order);
        check_rows("rows", from, sum_of(counts));
        const py::gil_scoped_release release;
        post_grouped_rows(channel, from.data, {from.row_bytes(), counts, order}, to_self);
      },
      py::arg("channel"), py::arg("rows"), py::arg("counts"), py::arg("order"), py::arg("to_self"));
  module.def(
      "post_rows",
      [](Channel& channel, const Tensor& rows, const std::vector<size_t>& counts) {
        const TensorRows from = rows_of(rows, "rows", kAnyDtype);
        check_rows("rows", from, std::accumulate(counts.begin(), counts.end(), size_t{0}));
        MessageBuilder builder = MessageBuilder::of_one_part(counts.size(), 1);
        size_t first = 0;
        for (size_t rank = 0; rank < counts.size(); ++rank) {
          builder.block(rank, 0) = {from.row(first), counts[rank] * from.row_bytes()};
          first += counts[rank];
        }
        const py::gil_scoped_release release;
        channel.post(builder.messages());
      },
      py::arg("channel"), py::arg("rows"), py::arg("counts"));

  py::class_<ColumnGroups>(module, "ColumnGroups")
      .def(py::init<const std::vector<ColumnGroups::GroupTuple>&>(), py::arg("groups"));
  module.def(
      "post_columns",
      [](Channel& channel, const Tensor& rows, const ColumnGroups& groups) {
        const TensorRows from = rows_of(rows, "rows", kAnyDtype);
        check_end("rows", from.columns, 0, groups.end, "columns");
        MessageBuilder builder =
            MessageBuilder::of_one_part(static_cast<size_t>(groups.end_rank), 1);
        for (const ColumnGroup& group : groups.in_bytes(from.item_bytes)) {
          for (int rank = group.first; rank < group.first + group.count; ++rank) {
            builder.block(static_cast<size_t>(rank), 0) = {
                from.data + group.offset_bytes, group.width_bytes, from.rows, from.stride_bytes()};
          }
        }
        const py::gil_scoped_release release;
        channel.post(builder.messages());
      },
      py::arg("channel"), py::arg("rows"), py::arg("groups"));
  module.def(
      "collect_columns",
      [](const Arrival& arrival, const Tensor& out, const ColumnGroups& groups) {
        const TensorRows to =
            rows_of(out, "out", groups.most_terms > 1 ? Dtypes{kFloat32} : kAnyDtype);
        check_end("out", to.columns, 0, groups.end, "columns");
        check_end("the arrival", static_cast<size_t>(arrival.world_size()), 0,
                  static_cast<size_t>(groups.end_rank), "ranks");
        const std::vector<ColumnGroup> list = groups.in_bytes(to.item_bytes);
        const py::gil_scoped_release release;
        collect_columns(arrival, to.data, to.rows, to.row_bytes(), list);
      },
      py::arg("arrival"), py::arg("out"), py::arg("groups"));

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

  module.def(
      "collect_grouped_rows",
      [](const Arrival& arrival, const Tensor& out, const std::vector<int64_t>& counts,
         const std::vector<int>& order) {
        const TensorRows to = rows_of(out, "out", kAnyDtype);
        check_order(counts, order);
        check_rows("out", to, sum_of(counts));
        const py::gil_scoped_release release;
        collect_grouped_rows(arrival, to.data, {to.row_bytes(), counts, order});
      },
      py::arg("arrival"), py::arg("out"), py::arg("counts"), py::arg("order"));
  // Those of `rank` lie in `own`, from its row `first` on, by `counts` and `order`.
  module.def(
      "collect_rows",
      [](const Arrival& arrival, const Tensor& out, const std::vector<int64_t>& rows_per_source,
         const std::optional<Tensor>& permutation, int rank, const Tensor& own, size_t first,
         const std::vector<int64_t>& counts, const std::vector<int>& order) {
        const TensorRows to = rows_of(out, "out", kAnyDtype);
        const TensorRows from = rows_of(own, "own", kAnyDtype);
        check_rows("out", to, sum_of(rows_per_source));
        check_count("own", from.row_bytes(), to.row_bytes(), "bytes in a row");
        check_order(counts, order);
        check_end("own", from.rows, first, sum_of(counts), "rows");
        std::span<const int64_t> indices;
        if (permutation) {
          const TensorItems items = items_of(*permutation, "permutation", kInt64);
          check_count("permutation", items.count, to.rows, "items");
          indices = {items.as<const int64_t>(), items.count};
        }
        const py::gil_scoped_release release;
        collect_rows(arrival, to.data, to.row_bytes(), rows_per_source, indices,
                     {rank, from.row(first), {to.row_bytes(), counts, order}});
      },
      py::arg("arrival"), py::arg("out"), py::arg("rows_per_source"), py::arg("permutation"),
      py::arg("rank"), py::arg("own"), py::arg("first"), py::arg("counts"), py::arg("order"));
  module.def(
      "collect_placed_rows",
      [](const Arrival& arrival, const Tensor& out, const std::vector<PlacedTuple>& tuples,
         const std::vector<size_t>& blocks_per_source) {
        const TensorItems to = items_of(out, "out", kUint8);
        std::vector<PlacedRows> placed;
        for (const auto& [offset, rows, bytes, pitch] : tuples) {
          placed.push_back({offset, rows, bytes, pitch});
        }
        const py::gil_scoped_release release;
        collect_placed_rows(arrival, to.data, to.bytes(), placed, blocks_per_source);
      },
      py::arg("arrival"), py::arg("out"), py::arg("placed"), py::arg("blocks_per_source"));
}

}  // namespace bls
