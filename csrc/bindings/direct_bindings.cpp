#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensors/jagged_argument.h"
#include "bindings/tensors/tensor_argument.h"
#include "lookup/direct/control_page.h"
#include "lookup/direct/direct_batch.h"
#include "lookup/direct/reader_slot.h"
#include "lookup/direct/table_pages.h"
#include "lookup/direct/table_segment.h"
#include "lookup/direct/table_window.h"
#include "lookup/direct/written_rows.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (pid, descriptor, device, inode, bytes)
using AddressTuple = std::tuple<int32_t, int32_t, uint64_t, uint64_t, uint64_t>;

/// (owner, version, digest of the layout)
using LabelTuple = std::tuple<uint32_t, std::string, py::bytes>;

/// (serial, name; empty if there is none)
using VersionTuple = std::tuple<uint64_t, std::string>;

/// (process, serial of the oldest version that it has mapped)
using ReaderTuple = std::pair<uint64_t, uint64_t>;

/// A pin, and the slot that has to outlive it. A keep_alive takes as long as all the rest of a pin.
struct HeldPin {
  py::object slot;
  SidePin pin;  // after the slot, so that it goes first
};

/// (tensor, offset in the segment)
using PartTuple = std::pair<Tensor, size_t>;
using Parts = py::typing::Iterable<PartTuple>;

/// (segment, offset in it, bytes)
using PieceTuple = std::tuple<const TableSegment*, size_t, size_t>;

/// (owner, offset in the window, rows)
using BlockTuple = std::tuple<size_t, size_t, size_t>;

/// (column in bytes, row bytes, rows per block, blocks)
using ColumnsTuple = std::tuple<size_t, size_t, int64_t, std::vector<BlockTuple>>;

/// (key, place in the output in bytes, whether means, columns)
using FeatureTuple = std::tuple<size_t, size_t, bool, std::vector<ColumnsTuple>>;

ControlPage::Digest digest_of(const py::bytes& bytes) {
  ControlPage::Digest digest = {};
  const std::string_view given = bytes;
  if (given.size() != digest.size()) {
    throw std::invalid_argument("a digest of " + std::to_string(given.size()) + " bytes, not " +
                                std::to_string(digest.size()));
  }
  std::memcpy(digest.data(), given.data(), given.size());
  return digest;
}

TableLabel label_of(const LabelTuple& tuple) {
  const auto& [owner, version, layout] = tuple;
  return {owner, version, digest_of(layout)};
}

MemoryFileAddress address_from(const AddressTuple& tuple) {
  const auto& [pid, fd, device, inode, bytes] = tuple;
  return {pid, fd, device, inode, bytes};
}

AddressTuple tuple_of(const MemoryFileAddress& a) {
  return {a.pid, a.fd, a.device, a.inode, a.bytes};
}

VersionTuple tuple_of(const ControlPage::Version& version) {
  return {version.serial, version.name};
}

/// Features of a lookup, by their place in the output. Made once, as Tables are.
struct ShardedFeatures {
  ShardedFeatures(const std::vector<FeatureTuple>& tuples, const TableWindow& window) {
    for (const auto& [key, out_byte, means, columns] : tuples) {
      ShardedFeature feature{key, out_byte, means, {}};
      for (const ColumnsTuple& of_table : columns)
        feature.columns.push_back(columns_of(of_table, window));
      in_order.push_back(std::move(feature));
    }
  }

  std::vector<ShardedFeature> in_order;

 private:
  static TableColumns columns_of(const ColumnsTuple& tuple, const TableWindow& window) {
    const auto& [column_byte, row_bytes, rows_per_block, blocks] = tuple;
    if (blocks.empty() || rows_per_block < 1) {
      throw std::invalid_argument("a table of no blocks, or of blocks without rows");
    }
    TableColumns columns{column_byte, row_bytes, BlockLength(rows_per_block), {}, {}};
    for (const auto& [owner, offset, rows] : blocks) {
      check_end("a window", window.size(), offset, rows * row_bytes, "bytes");
      columns.blocks.push_back(window.data() + offset);
      columns.owners.push_back(owner);
    }
    return columns;
  }
};

/// See BLSConfig: bool, or "hugetlb".
using HugePagesArgument = std::variant<bool, std::string>;

HugePages pages_of(const HugePagesArgument& argument) {
  if (const bool* const asks = std::get_if<bool>(&argument)) {
    return *asks ? HugePages::kTransparent : HugePages::kNo;
  }
  if (std::get<std::string>(argument) == "hugetlb") return HugePages::kPool;
  throw std::invalid_argument("huge_pages is '" + std::get<std::string>(argument) +
                              "', but must be a bool or 'hugetlb'");
}

TableSegment create_segment(const LabelTuple& label, const Parts& parts, size_t bytes,
                            const HugePagesArgument& huge_pages, size_t first, bool refreshed) {
  py::iterator at = py::iter(parts);
  std::optional<PartTuple> part;  // what is written
  const NextPart next = [&]() -> std::optional<TablePart> {
    const py::gil_scoped_acquire acquire;
    if (part) ++at;
    if (at == py::iterator::sentinel()) return std::nullopt;
    part = at->cast<PartTuple>();
    const TensorItems items = items_of(part->first, "a part", kAnyDtype);
    return TablePart{items.data, items.bytes(), part->second};
  };
  const TableLabel of_segment = label_of(label);
  const HugePages pages = pages_of(huge_pages);
  const auto kind = refreshed ? TableSegment::Kind::kRefreshed : TableSegment::Kind::kConstant;
  const py::gil_scoped_release release;
  return TableSegment::create(of_segment, next, bytes, pages, first, kind);
}

std::span<int64_t> numbers_in(const TensorItems& items) {
  return {items.as<int64_t>(), items.count};
}

void copy_rows_looked_up(const ShardedFeatures& features, const Tensor& values,
                         const std::vector<int64_t>& counts, const Tensor& rows_read,
                         const Tensor& out) {
  const JaggedIds ids = ids_alone(values, counts.size());
  const TensorItems read = items_of(rows_read, "rows_read", kInt64);
  const TensorRows to = rows_of(out, "out", kAnyDtype);
  const py::gil_scoped_release release;
  const DirectBatch batch{ids, counts, features.in_order, numbers_in(read)};
  copy_rows_directly(batch, to.row_bytes(), {to.data, to.bytes()});
}

void sum_rows(const ShardedFeatures& features, const Tensor& lengths, const Tensor& values,
              const std::optional<Tensor>& weights, size_t stride,
              const std::vector<int64_t>& counts, const Tensor& rows_read, const Tensor& out) {
  const JaggedIds ids = jagged_ids(lengths, values, weights, counts.size(), stride);
  const TensorItems read = items_of(rows_read, "rows_read", kInt64);
  const TensorRows to = rows_of(out, "out", kFloat32);
  const py::gil_scoped_release release;
  const DirectBatch batch{ids, counts, features.in_order, numbers_in(read)};
  sum_rows_directly(batch, to.row_bytes(), {to.data, to.bytes()});
}

std::vector<SegmentPages> pieces_of(const std::vector<PieceTuple>& tuples) {
  std::vector<SegmentPages> pieces;
  for (const auto& [segment, offset, bytes] : tuples) {
    if (segment == nullptr) throw std::invalid_argument("a piece of no segment");
    pieces.push_back({segment, offset, bytes});
  }
  return pieces;
}

TableWindow window_of(const std::vector<PieceTuple>& tuples, bool shared) {
  const std::vector<SegmentPages> pieces = pieces_of(tuples);
  const py::gil_scoped_release release;
  return TableWindow(pieces, shared ? TableWindow::Pages::kShared : TableWindow::Pages::kPrivate);
}

void write_table_rows(const std::vector<PieceTuple>& tuples, const Tensor& ids,
                      const Tensor& rows) {
  const std::vector<SegmentPages> pieces = pieces_of(tuples);
  const TensorItems numbers = items_of(ids, "ids", kInt64);
  const TensorRows from = rows_of(rows, "rows", kAnyDtype);
  check_rows("rows", from, numbers.count);
  const py::gil_scoped_release release;
  write_rows(pieces, from.row_bytes(), numbers_in(numbers), from.data);
}

void copy_table_rows(const std::vector<PieceTuple>& from, const std::vector<PieceTuple>& to,
                     size_t row_bytes, const Tensor& ids) {
  const std::vector<SegmentPages> sources = pieces_of(from), pieces = pieces_of(to);
  const TensorItems numbers = items_of(ids, "ids", kInt64);
  const py::gil_scoped_release release;
  copy_rows(sources, pieces, row_bytes, numbers_in(numbers));
}

void bind_segments(py::module_& module) {
  // To unmap gigabytes takes long, during which other threads look batches up.
  py::class_<TableSegment>(module, "TableSegment", py::release_gil_before_calling_cpp_dtor())
      .def_static("create", &create_segment, py::arg("label"), py::arg("parts"), py::arg("bytes"),
                  py::arg("huge_pages"), py::arg("first") = TableSegment::kFirstOffset,
                  py::arg("refreshed") = false)
      .def_static(
          "open",
          [](const AddressTuple& t, const LabelTuple& expected) {
            const MemoryFileAddress address = address_from(t);
            const TableLabel label = label_of(expected);
            const py::gil_scoped_release release;
            return TableSegment::open(address, label);
          },
          py::arg("address"), py::arg("expected"))
      .def_static(
          "adopt",
          [](int descriptor, const LabelTuple& expected) {
            Descriptor file = duplicated(descriptor);
            const TableLabel label = label_of(expected);
            const py::gil_scoped_release release;
            return TableSegment::adopt(std::move(file), label);
          },
          py::arg("descriptor"), py::arg("expected"))
      .def_property_readonly("size", &TableSegment::size)
      .def_property_readonly("small_page_bytes", &TableSegment::small_page_bytes)
      .def_property_readonly("is_refreshed",
                             [](const TableSegment& segment) {
                               return segment.kind() == TableSegment::Kind::kRefreshed;
                             })
      .def_property_readonly("descriptor", &TableSegment::descriptor)
      .def_property_readonly(
          "address", [](const TableSegment& segment) { return tuple_of(segment.address()); });
  module.attr("FIRST_TABLE_OFFSET") = TableSegment::kFirstOffset;
  py::class_<PrivatePages>(module, "PrivatePages", py::buffer_protocol())
      .def(py::init<const TableSegment&>(), py::arg("segment"))
      .def_buffer([](const PrivatePages& pages) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(pages.data()),
                               static_cast<py::ssize_t>(pages.size()));
      });
  py::class_<TableWindow>(module, "TableWindow", py::buffer_protocol(),
                          py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&window_of), py::arg("pieces"), py::arg("shared") = false)
      .def("populate", &TableWindow::populate, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly(
          "address",
          [](const TableWindow& window) { return reinterpret_cast<uintptr_t>(window.data()); })
      .def_buffer([](const TableWindow& window) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(window.data()),
                               static_cast<py::ssize_t>(window.size()), window.is_read_only());
      });
}

void bind_control_page(py::module_& module) {
  py::class_<ControlPage>(module, "ControlPage")
      .def_static(
          "create",
          [](uint32_t owners, const py::bytes& layout) {
            return ControlPage::create(owners, digest_of(layout));
          },
          py::arg("owners"), py::arg("layout"))
      .def_static(
          "open",
          [](const AddressTuple& address, uint32_t owners, const py::bytes& layout) {
            return ControlPage::open(address_from(address), owners, digest_of(layout));
          },
          py::arg("address"), py::arg("owners"), py::arg("layout"))
      .def_static(
          "adopt",
          [](int descriptor, uint32_t owners, const py::bytes& layout) {
            Descriptor file = duplicated(descriptor);
            return ControlPage::adopt(std::move(file), owners, digest_of(layout));
          },
          py::arg("descriptor"), py::arg("owners"), py::arg("layout"))
      .def(
          "record",
          [](ControlPage& page, uint32_t owner, uint64_t serial, const std::string& version,
             const AddressTuple& segment) {
            page.record(owner, serial, version, address_from(segment));
          },
          py::arg("owner"), py::arg("serial"), py::arg("version"), py::arg("segment"))
      .def(
          "recorded",
          [](const ControlPage& page, uint32_t owner,
             uint64_t serial) -> std::optional<std::pair<std::string, AddressTuple>> {
            const std::optional<ControlPage::Recorded> found = page.recorded(owner, serial);
            if (!found) return std::nullopt;
            return {{found->name, tuple_of(found->segment)}};
          },
          py::arg("owner"), py::arg("serial"))
      .def("announce", &ControlPage::announce, py::arg("owner"), py::arg("serial"))
      // Versions are (serial, name), (0, "") if there is none.
      .def(
          "pending",
          [](const ControlPage& page, uint32_t owner) { return tuple_of(page.pending(owner)); },
          py::arg("owner"))
      .def("withdraw", &ControlPage::withdraw, py::arg("owner"))
      .def(
          "withdrawn",
          [](const ControlPage& page, uint32_t owner) { return tuple_of(page.withdrawn(owner)); },
          py::arg("owner"))
      .def("settle", &ControlPage::settle)
      .def("process", &ControlPage::process, py::arg("owner"))
      .def("take_over", &ControlPage::take_over, py::arg("owner"), py::arg("before"),
           py::arg("next"))
      .def("abandon", &ControlPage::abandon, py::arg("owner"))
      .def("serial_on", &ControlPage::serial_on, py::arg("side"))
      .def("set_serial_on", &ControlPage::set_serial_on, py::arg("side"), py::arg("serial"))
      .def("holders", &ControlPage::holders, py::arg("side"))
      .def("readers",
           [](const ControlPage& page) {
             std::vector<ReaderTuple> readers;
             for (const TableReader& each : page.readers()) {
               readers.emplace_back(each.process, each.oldest);
             }
             return readers;
           })
      .def_property_readonly("abandoned_by", &ControlPage::abandoned_by)
      .def_property_readonly("serial", &ControlPage::serial)
      .def_property_readonly("serving",
                             [](const ControlPage& page) { return tuple_of(page.serving()); })
      .def_property_readonly("descriptor", &ControlPage::descriptor)
      .def_property_readonly("address",
                             [](const ControlPage& page) { return tuple_of(page.address()); });
}

}  // namespace

void bind_reader_slots(py::module_& module) {
  py::class_<HeldPin>(module, "SidePin");
  py::class_<ReaderSlot>(module, "ReaderSlot")
      .def_static(
          "take",
          [](ControlPage& page, uint64_t process, uint64_t oldest,
             const ReaderSlots::IsAlive& is_alive) {
            return ReaderSlot::take(page, {process, oldest}, is_alive);
          },
          py::arg("page"), py::arg("process"), py::arg("oldest"), py::arg("is_alive"),
          py::keep_alive<0, 1>())
      .def("tell", &ReaderSlot::tell, py::arg("oldest"))
      .def(
          "pin",
          [](py::object slot, uint32_t side, uint64_t serial) -> std::optional<HeldPin> {
            std::optional<SidePin> pin = slot.cast<ReaderSlot&>().pin(side, serial);
            if (!pin) return std::nullopt;
            return HeldPin{std::move(slot), std::move(*pin)};
          },
          py::arg("side"), py::arg("serial"));
}

void bind_direct(py::module_& module) {
  module.def("work_beside_lookups", &work_beside_lookups);
  module.def("end_work_beside_lookups", &end_work_beside_lookups);
  bind_segments(module);
  bind_control_page(module);
  bind_reader_slots(module);
  py::class_<ShardedFeatures>(module, "ShardedFeatures")
      // Whoever looks rows up keeps the window that they lie in, whatever other threads drop.
      .def(py::init<const std::vector<FeatureTuple>&, const TableWindow&>(), py::arg("features"),
           py::arg("window"), py::keep_alive<1, 3>());
  module.def("write_rows", &write_table_rows, py::arg("pieces"), py::arg("ids"), py::arg("rows"));
  module.def("copy_rows", &copy_table_rows, py::arg("sources"), py::arg("pieces"),
             py::arg("row_bytes"), py::arg("ids"));
  module.def("copy_rows_directly", &copy_rows_looked_up, py::arg("features"), py::arg("values"),
             py::arg("counts"), py::arg("rows_read"), py::arg("out"));
  module.def("sum_rows_directly", &sum_rows, py::arg("features"), py::arg("lengths"),
             py::arg("values"), py::arg("weights"), py::arg("stride"), py::arg("counts"),
             py::arg("rows_read"), py::arg("out"));
}

}  // namespace bls
