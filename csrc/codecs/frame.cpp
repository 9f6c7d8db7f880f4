#include "codecs/frame.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "codecs/checksum.h"
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
  uint32_t reserved = 0;
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
  return is_bounded(table) ? table.groups.travelling(table.rows.rows) : table.rows.rows;
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

size_t encode_table(const FrameTable<const float>& table, std::span<std::byte> out) {
  if (!is_bounded(table)) return encode(table.codec, table.rows, out);
  return bounded::encode(table.bound, table.rows, table.groups, out);
}

void decode_table(const FrameTable<float>& table, std::span<const std::byte> in) {
  if (!is_bounded(table)) return decode(table.codec, in, table.rows);
  bounded::decode(table.bound, in, table.rows, table.groups);
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
    bytes += is_bounded(table) ? bounded::min_bytes(rows_of(table), table.rows.columns)
                               : usual_bytes(table.codec, table.rows.rows, table.rows.columns);
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
