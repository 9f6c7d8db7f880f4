#include "codecs/frame.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "codecs/checksum.h"
#include "codecs/scratch.h"
#include "errors.h"

namespace bls {
namespace {

constexpr uint16_t kMagic = 0xb1cf;
constexpr uint8_t kVersion = 1, kVersionWithBounds = 2;

struct Header {
  uint16_t magic = kMagic;
  uint8_t version = kVersion;
  uint8_t flags = 0;
  uint32_t checksum = 0;  // of all that follows
  uint64_t rows = 0;      // of all tables
  uint32_t tables = 0;
  uint32_t groups = 0;  // checksum of which rows belong together, 0 if none are known to
};
static_assert(sizeof(Header) == kFrameHeaderBytes);
constexpr size_t kChecked = offsetof(Header, rows);

struct Entry {
  uint8_t codec = 0;
  uint8_t reserved[3] = {};
  uint32_t bytes = 0;
};
static_assert(sizeof(Entry) == kFrameTableBytes);

template <typename T>
bool is_bounded(const FrameTable<T>& table) {
  return table.codec == Codec::kErrorBounded;
}

template <typename T>
bool has_bounds(std::span<const FrameTable<T>> tables) {
  return std::any_of(tables.begin(), tables.end(), is_bounded<T>);
}

/// Rows that travel.
template <typename T>
size_t rows_of(const FrameTable<T>& table) {
  return table.groups.travelling(table.rows.rows);
}

template <typename T>
uint64_t rows_of(std::span<const FrameTable<T>> tables) {
  uint64_t rows = 0;
  for (const FrameTable<T>& table : tables) rows += rows_of(table);
  return rows;
}

template <typename T>
size_t header_bytes(std::span<const FrameTable<T>> tables) {
  return kFrameHeaderBytes + (has_bounds(tables) ? kFrameBoundsBytes : 0);
}

template <typename T>
size_t head_bytes(std::span<const FrameTable<T>> tables) {
  return header_bytes(tables) + tables.size() * kFrameTableBytes;
}

/// The checksum of all bounds in their order.
template <typename T>
uint32_t checksum_of_bounds(std::span<const FrameTable<T>> tables) {
  std::vector<float> bounds;
  for (const FrameTable<T>& table : tables) {
    if (is_bounded(table)) bounds.push_back(table.bound);
  }
  return crc32c(std::as_bytes(std::span(bounds)));
}

/// The checksum of the groups of all tables that have any.
template <typename T>
uint32_t checksum_of_groups(std::span<const FrameTable<T>> tables) {
  uint32_t checksum = 0;
  for (const FrameTable<T>& table : tables) {
    if (table.groups.known()) checksum = crc32c(std::as_bytes(table.groups.of_row), checksum);
  }
  return checksum;
}

/// Whether equal rows are left to the codec, which takes the first of each group where it lies.
template <typename T>
bool codec_groups(const FrameTable<T>& table) {
  return is_bounded(table) && !table.summed;
}

size_t encode_table(const FrameTable<const float>& table, std::span<std::byte> out) {
  static thread_local Scratch<float> scratch;
  Matrix<const float> rows = table.rows;
  const RowGroups& groups = table.groups;
  const auto bounded = [&](const RowGroups& known) {
    return bounded::encode(table.bound, rows, known, table.fixed_width, out);
  };
  if (codec_groups(table)) return bounded(groups);
  if (groups.known()) {
    check_groups(groups, rows.rows);
    float* const gathered = scratch.of(groups.count * rows.columns);
    gather_groups(rows, groups, table.summed, gathered);
    rows = {gathered, groups.count, rows.columns, rows.columns};
  }
  return is_bounded(table) ? bounded({}) : encode(table.codec, rows, out);
}

void decode_table(const FrameTable<float>& table, std::span<const std::byte> in) {
  static thread_local Scratch<float> scratch;
  const RowGroups& groups = table.groups;
  if (codec_groups(table)) return bounded::decode(table.bound, in, table.rows, groups);
  Matrix<float> rows = table.rows;
  if (groups.known()) {
    check_groups(groups, rows.rows);
    rows = {scratch.of(groups.count * rows.columns), groups.count, rows.columns, rows.columns};
  }
  if (is_bounded(table)) {
    bounded::decode(table.bound, in, rows, {});
  } else {
    decode(table.codec, in, rows);
  }
  if (groups.known()) spread_groups(rows.data, groups, table.summed, table.rows);
}

[[noreturn]] void refuse(const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol, "the frame of encoded rows " + what);
}

template <typename Number>
void expect(const char* what, Number found, Number expected) {
  if (found == expected) return;
  refuse("has " + std::string(what) + " " + std::to_string(found) + ", expected " +
         std::to_string(expected) +
         ": install one version of torchrec-bls on all ranks, and give "
         "them one plan of codecs");
}

void check_bounds(std::span<const std::byte> in, std::span<const FrameTable<float>> tables) {
  uint32_t found;
  std::memcpy(&found, in.data() + kFrameHeaderBytes, sizeof found);
  if (found == checksum_of_bounds(tables)) return;
  refuse(
      "was made with other error bounds: give all ranks the same bounds and the same iteration, "
      "from a checkpoint too");
}

}  // namespace

size_t least_frame_bytes(std::span<const FrameTable<const float>> tables) {
  size_t bytes = head_bytes(tables);
  for (const auto& table : tables) {
    const size_t rows = rows_of(table), columns = table.rows.columns;
    bytes += is_bounded(table) ? bounded::min_bytes(rows, columns)
                               : usual_bytes(table.codec, rows, columns);
  }
  return bytes;
}

size_t usual_frame_bytes(std::span<const FrameTable<const float>> tables) {
  size_t bytes = head_bytes(tables);
  for (const auto& table : tables) {
    const size_t rows = table.rows.rows, columns = table.rows.columns;
    bytes += is_bounded(table) ? rows * columns : usual_bytes(table.codec, rows, columns);
  }
  return bytes;
}

size_t encode_frame(std::span<const FrameTable<const float>> tables, std::span<std::byte> out) {
  size_t end = head_bytes(tables);
  size_t entry_at = header_bytes(tables);
  for (const auto& table : tables) {
    // Once it is known that there is too little room, the rest is only measured.
    const auto room = end <= out.size() ? out.subspan(end) : std::span<std::byte>();
    const size_t bytes = encode_table(table, room);
    if (bytes > std::numeric_limits<uint32_t>::max()) {
      throw std::invalid_argument("a table takes " + std::to_string(bytes) +
                                  " encoded bytes for one rank, more than 4 GiB");
    }
    end += bytes;
    const Entry entry{static_cast<uint8_t>(table.codec), {}, static_cast<uint32_t>(bytes)};
    if (end <= out.size()) std::memcpy(out.data() + entry_at, &entry, sizeof entry);
    entry_at += sizeof entry;
  }
  if (end > out.size()) return end;
  Header header;
  if (has_bounds(tables)) {
    header.version = kVersionWithBounds;
    const uint32_t bounds = checksum_of_bounds(tables);
    std::memcpy(out.data() + kFrameHeaderBytes, &bounds, sizeof bounds);
  }
  header.rows = rows_of(tables);
  header.tables = static_cast<uint32_t>(tables.size());
  header.groups = checksum_of_groups(tables);
  std::memcpy(out.data(), &header, sizeof header);
  header.checksum = crc32c(out.first(end).subspan(kChecked));
  std::memcpy(out.data(), &header, sizeof header);
  return end;
}

void decode_frame(std::span<const std::byte> in, std::span<const FrameTable<float>> tables) {
  const size_t head = head_bytes(tables);
  if (in.size() < head) {
    refuse("has " + std::to_string(in.size()) + " bytes, but its head alone needs " +
           std::to_string(head));
  }
  Header header;
  std::memcpy(&header, in.data(), sizeof header);
  expect<int>("magic number", header.magic, kMagic);
  expect<int>("version", header.version, has_bounds(tables) ? kVersionWithBounds : kVersion);
  if (header.checksum != crc32c(in.subspan(kChecked))) {
    refuse(
        "is damaged: the checksum differs. A network that changes bytes, or a write out of bounds "
        "in one of the two processes, causes this");
  }
  expect<int>("flags", header.flags, 0);
  expect<uint64_t>("tables", header.tables, tables.size());
  if (header.groups != checksum_of_groups(tables)) {
    refuse(
        "was made with other groups of equal rows: the ids that the rows were looked up for are "
        "not those that were sent. Leave a batch as it is until its embeddings have arrived");
  }
  expect<uint64_t>("rows", header.rows, rows_of(tables));
  if (has_bounds(tables)) check_bounds(in, tables);
  const size_t entries_at = header_bytes(tables);
  std::span<const std::byte> rest = in.subspan(head);
  for (size_t index = 0; index < tables.size(); ++index) {
    Entry entry;
    std::memcpy(&entry, in.data() + entries_at + index * sizeof entry, sizeof entry);
    expect<int>("a table with codec", entry.codec, static_cast<int>(tables[index].codec));
    if (entry.bytes > rest.size()) refuse("ends within table " + std::to_string(index));
    decode_table(tables[index], rest.first(entry.bytes));
    rest = rest.subspan(entry.bytes);
  }
  if (!rest.empty()) refuse("has " + std::to_string(rest.size()) + " bytes behind its last table");
}

}  // namespace bls
