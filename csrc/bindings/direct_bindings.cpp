#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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
#include <vector>

#include "bindings/bindings.h"
#include "lookup/direct/control_page.h"
#include "lookup/direct/direct_batch.h"
#include "lookup/direct/table_pages.h"
#include "lookup/direct/table_segment.h"
#include "lookup/direct/table_window.h"

namespace py = pybind11;

namespace bls {
namespace {

/// (pid, descriptor, device, inode, bytes)
using AddressTuple = std::tuple<int32_t, int32_t, uint64_t, uint64_t, uint64_t>;

/// (owner, version, digest of the layout)
using LabelTuple = std::tuple<uint32_t, std::string, py::bytes>;

/// (serial, name; empty if there is none)
using VersionTuple = std::tuple<uint64_t, std::string>;

/// (address, bytes, offset in the segment)
using PartTuple = std::tuple<uintptr_t, size_t, size_t>;

/// (segment, offset in it, bytes)
using PieceTuple = std::tuple<const TableSegment*, size_t, size_t>;

/// (column in bytes, row bytes, rows per block, addresses of the blocks, their owners)
using ColumnsTuple =
    std::tuple<size_t, size_t, int64_t, std::vector<uintptr_t>, std::vector<size_t>>;

/// (key, place in the output in bytes, whether means, columns)
using FeatureTuple = std::tuple<size_t, size_t, bool, std::vector<ColumnsTuple>>;

/// (address, bytes of an item, or number of items)
using Items = std::pair<uintptr_t, size_t>;

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

/// Features of a lookup, by their place in the output. Made once, as Tables are. They point into
/// memory that somebody else keeps.
struct ShardedFeatures {
  explicit ShardedFeatures(const std::vector<FeatureTuple>& tuples) {
    for (const auto& [key, out_byte, means, columns] : tuples) {
      ShardedFeature feature{key, out_byte, means, {}};
      for (const auto& [column_byte, row_bytes, rows_per_block, blocks, owners] : columns) {
        if (blocks.empty() || rows_per_block < 1) {
          throw std::invalid_argument("a table of no blocks, or of blocks without rows");
        }
        TableColumns of_table{column_byte, row_bytes, BlockLength(rows_per_block), {}, owners};
        for (const uintptr_t block : blocks) of_table.blocks.push_back(pointer(block));
        feature.columns.push_back(std::move(of_table));
      }
      in_order.push_back(std::move(feature));
    }
  }

  std::vector<ShardedFeature> in_order;
};

JaggedIds ids_of(const Items& lengths, const Items& values, const Items& weights, size_t keys,
                 size_t stride, size_t count) {
  return {pointer(lengths.first),
          lengths.second,
          pointer(values.first),
          values.second,
          weights.first == 0 ? nullptr : pointer(weights.first),
          weights.second,
          keys,
          stride,
          count};
}

std::span<int64_t> numbers_at(const Items& array) {
  return {reinterpret_cast<int64_t*>(array.first), array.second};
}

std::span<std::byte> bytes_at(const Items& memory) {
  return {pointer(memory.first), memory.second};
}

TableWindow window_of(const std::vector<PieceTuple>& tuples) {
  std::vector<SegmentPages> pieces;
  for (const auto& [segment, offset, bytes] : tuples) {
    if (segment == nullptr) throw std::invalid_argument("a piece of no segment");
    pieces.push_back({segment, offset, bytes});
  }
  const py::gil_scoped_release release;
  return TableWindow(pieces);
}

void bind_segments(py::module_& module) {
  // To unmap gigabytes takes long, during which other threads look batches up.
  py::class_<TableSegment>(module, "TableSegment", py::release_gil_before_calling_cpp_dtor())
      .def_static("create",
                  [](const LabelTuple& label, const std::vector<PartTuple>& tuples, size_t bytes,
                     bool huge_pages) {
                    std::vector<TablePart> parts;
                    for (const auto& [address, size, offset] : tuples) {
                      parts.push_back({pointer(address), size, offset});
                    }
                    const TableLabel of_segment = label_of(label);
                    const py::gil_scoped_release release;
                    return TableSegment::create(of_segment, parts, bytes, huge_pages);
                  })
      .def_static("open",
                  [](const AddressTuple& t, const LabelTuple& expected) {
                    const MemoryFileAddress address = address_from(t);
                    const TableLabel label = label_of(expected);
                    const py::gil_scoped_release release;
                    return TableSegment::open(address, label);
                  })
      .def_static("adopt",
                  [](int descriptor, const LabelTuple& expected) {
                    Descriptor file = duplicated(descriptor);
                    const TableLabel label = label_of(expected);
                    const py::gil_scoped_release release;
                    return TableSegment::adopt(std::move(file), label);
                  })
      .def_property_readonly(
          "data",
          [](const TableSegment& segment) { return reinterpret_cast<uintptr_t>(segment.data()); })
      .def_property_readonly("size", &TableSegment::size)
      .def_property_readonly("descriptor", &TableSegment::descriptor)
      .def_property_readonly(
          "address", [](const TableSegment& segment) { return tuple_of(segment.address()); });
  module.attr("FIRST_TABLE_OFFSET") = TableSegment::kFirstOffset;
  py::class_<PrivatePages>(module, "PrivatePages", py::buffer_protocol())
      .def(py::init<const TableSegment&>())
      .def_buffer([](const PrivatePages& pages) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(pages.data()),
                               static_cast<py::ssize_t>(pages.size()));
      });
  py::class_<TableWindow>(module, "TableWindow", py::buffer_protocol())
      .def(py::init(&window_of))
      .def_buffer([](const TableWindow& window) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(window.data()),
                               static_cast<py::ssize_t>(window.size()));
      });
}

void bind_control_page(py::module_& module) {
  py::class_<ControlPage>(module, "ControlPage")
      .def_static("create",
                  [](uint32_t owners, const py::bytes& layout) {
                    return ControlPage::create(owners, digest_of(layout));
                  })
      .def_static("open",
                  [](const AddressTuple& address, uint32_t owners, const py::bytes& layout) {
                    return ControlPage::open(address_from(address), owners, digest_of(layout));
                  })
      .def_static("adopt",
                  [](int descriptor, uint32_t owners, const py::bytes& layout) {
                    Descriptor file = duplicated(descriptor);
                    return ControlPage::adopt(std::move(file), owners, digest_of(layout));
                  })
      .def("record",
           [](ControlPage& page, uint32_t owner, uint64_t serial, const std::string& version,
              const AddressTuple& segment) {
             page.record(owner, serial, version, address_from(segment));
           })
      .def("recorded",
           [](const ControlPage& page, uint32_t owner,
              uint64_t serial) -> std::optional<std::pair<std::string, AddressTuple>> {
             const std::optional<ControlPage::Recorded> found = page.recorded(owner, serial);
             if (!found) return std::nullopt;
             return {{found->name, tuple_of(found->segment)}};
           })
      .def("announce", &ControlPage::announce)
      .def("pending",
           [](const ControlPage& page, uint32_t owner) { return tuple_of(page.pending(owner)); })
      .def("withdraw", &ControlPage::withdraw)
      .def("withdrawn",
           [](const ControlPage& page, uint32_t owner) { return tuple_of(page.withdrawn(owner)); })
      .def("settle", &ControlPage::settle)
      .def("process", &ControlPage::process)
      .def("take_over", &ControlPage::take_over)
      .def("abandon", &ControlPage::abandon)
      .def_property_readonly("abandoned_by", &ControlPage::abandoned_by)
      .def_property_readonly("serial", &ControlPage::serial)
      .def_property_readonly("serving",
                             [](const ControlPage& page) { return tuple_of(page.serving()); })
      .def_property_readonly("descriptor", &ControlPage::descriptor)
      .def_property_readonly("address",
                             [](const ControlPage& page) { return tuple_of(page.address()); });
}

}  // namespace

void bind_direct(py::module_& module) {
  module.def("work_beside_lookups", &work_beside_lookups);
  module.def("end_work_beside_lookups", &end_work_beside_lookups);
  bind_segments(module);
  bind_control_page(module);
  // Whoever looks rows up keeps the memory that they lie in, whatever other threads drop.
  py::class_<ShardedFeatures>(module, "ShardedFeatures")
      .def(py::init([](const std::vector<FeatureTuple>& tuples, const py::object&) {
             return ShardedFeatures(tuples);
           }),
           py::keep_alive<1, 3>());
  module.def("copy_rows_directly", [](const ShardedFeatures& features, const Items& values,
                                      size_t count, const std::vector<int64_t>& counts,
                                      const Items& rows_read, size_t row_bytes, const Items& out) {
    const py::gil_scoped_release release;
    const JaggedIds ids = ids_of({}, values, {}, counts.size(), 0, count);
    const DirectBatch batch{ids, counts, features.in_order, numbers_at(rows_read)};
    copy_rows_directly(batch, row_bytes, bytes_at(out));
  });
  module.def("sum_rows_directly", [](const ShardedFeatures& features, const Items& lengths,
                                     const Items& values, const Items& weights, size_t stride,
                                     size_t count, const std::vector<int64_t>& counts,
                                     const Items& rows_read, size_t out_stride, const Items& out) {
    const py::gil_scoped_release release;
    const JaggedIds ids = ids_of(lengths, values, weights, counts.size(), stride, count);
    const DirectBatch batch{ids, counts, features.in_order, numbers_at(rows_read)};
    sum_rows_directly(batch, out_stride, bytes_at(out));
  });
}

}  // namespace bls
