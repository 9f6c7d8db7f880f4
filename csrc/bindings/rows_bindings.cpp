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
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensors/tensor_argument.h"
#include "host/page_pool.h"
#include "messages/message_builder.h"
#include "messages/rows/row_message.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (offset in bytes, rows, bytes of a row, from row to row)
using PlacedTuple = std::tuple<size_t, size_t, size_t, size_t>;

size_t sum_of(std::span<const int64_t> counts) {
  return static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
}

/// The columns of a pooled output, by the ranks that they come from, in the order of the ranks.
/// Made once, as Tables are.
struct ColumnGroups {
  /// (first rank, ranks, first column, columns)
  using GroupTuple = std::tuple<int, int, size_t, size_t>;

  explicit ColumnGroups(const std::vector<GroupTuple>& tuples) {
    for (const auto& [first, count, offset, width] : tuples) {
      if (first < 0 || count < 1) throw std::invalid_argument("columns of no rank");
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

/// Throws std::invalid_argument unless `counts` has one of each rank of `order` for each feature.
void check_counts(const std::vector<int64_t>& counts, const std::vector<int>& order) {
  if (order.empty() || counts.size() % order.size() != 0) {
    throw std::invalid_argument(std::to_string(counts.size()) + " counts for " +
                                std::to_string(order.size()) + " ranks");
  }
  if (std::ranges::any_of(counts, [](int64_t count) { return count < 0; })) {
    throw std::invalid_argument("a count is negative");
  }
}

/// The same where the ranks of `order` are those that messages go to or come from.
void check_counts(const std::vector<int64_t>& counts, const std::vector<int>& order, size_t world) {
  check_counts(counts, order);
  for (const int rank : order) {
    if (rank < 0 || static_cast<size_t>(rank) >= world) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(world));
    }
  }
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
        check_counts(counts, order, order.size());
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

  module.def(
      "collect_grouped_rows",
      [](const Arrival& arrival, const Tensor& out, const std::vector<int64_t>& counts,
         const std::vector<int>& order) {
        const TensorRows to = rows_of(out, "out", kAnyDtype);
        check_counts(counts, order, static_cast<size_t>(arrival.world_size()));
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
        check_counts(counts, order);
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
