#include "codecs/frame.h"

#include <cstring>
#include <string>
#include <vector>

#include "codecs/checksum.h"
#include "codecs/scratch.h"
#include "errors.h"

namespace bls {
namespace {

constexpr uint16_t kMagic = 0xb1cf;
constexpr uint8_t kVersion = 3;

struct Header {
  uint16_t magic = kMagic;
  uint8_t version = kVersion;
  uint8_t flags = 0;
  uint32_t checksum = 0;  // of all that follows
  uint64_t rows = 0;      // of all tables
  uint32_t tables = 0;
  uint32_t groups = 0;  // checksum of which rows belong together, 0 if none are known to
  uint32_t bounds = 0;  // checksum of the error bounds in force, 0 if there are none
};
// The struct is padded to a multiple of eight bytes.
static_assert(offsetof(Header, bounds) + sizeof(Header::bounds) == kFrameHeaderBytes);
constexpr size_t kChecked = offsetof(Header, rows);

template <typename T>
bool is_bounded(const FrameTable<T>& table) {
  return table.codec == Codec::kErrorBounded;
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
size_t head_bytes(std::span<const FrameTable<T>> tables) {
  return kFrameHeaderBytes + tables.size() * kFrameTableBytes;
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

/// Returns how many bytes the table takes.
size_t decode_table(const FrameTable<float>& table, std::span<const std::byte> in) {
  static thread_local Scratch<float> scratch;
  const RowGroups& groups = table.groups;
  if (codec_groups(table)) return bounded::decode(table.bound, in, table.rows, groups);
  Matrix<float> rows = table.rows;
  if (groups.known()) {
    check_groups(groups, rows.rows);
    rows = {scratch.of(groups.count * rows.columns), groups.count, rows.columns, rows.columns};
  }
  const size_t bytes = is_bounded(table) ? bounded::decode(table.bound, in, rows, {})
                                         : decode(table.codec, in, rows);
  if (groups.known()) spread_groups(rows.data, groups, table.summed, table.rows);
  return bytes;
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
  for (const auto& table : tables) {
    // Once it is known that there is too little room, the rest is only measured.
    end += encode_table(table, end <= out.size() ? out.subspan(end) : std::span<std::byte>());
  }
  if (end > out.size()) return end;
  Header header;
  header.rows = rows_of(tables);
  header.tables = static_cast<uint32_t>(tables.size());
  header.groups = checksum_of_groups(tables);
  header.bounds = checksum_of_bounds(tables);
  std::memcpy(out.data(), &header, kFrameHeaderBytes);
  for (size_t index = 0; index < tables.size(); ++index) {
    out[kFrameHeaderBytes + index] = static_cast<std::byte>(tables[index].codec);
  }
  header.checksum = crc32c(out.first(end).subspan(kChecked));
  std::memcpy(out.data(), &header, kFrameHeaderBytes);
  return end;
}

void decode_frame(std::span<const std::byte> in, std::span<const FrameTable<float>> tables) {
  const size_t head = head_bytes(tables);
  if (in.size() < head) {
    refuse("has " + std::to_string(in.size()) + " bytes, but its head alone needs " +
           std::to_string(head));
  }
  Header header;
  std::memcpy(static_cast<void*>(&header), in.data(), kFrameHeaderBytes);
  expect<int>("magic number", header.magic, kMagic);
  expect<int>("version", header.version, kVersion);
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
  for (size_t index = 0; index < tables.size(); ++index) {
    expect("a table with codec", static_cast<int>(in[kFrameHeaderBytes + index]),
           static_cast<int>(tables[index].codec));
  }
  if (header.bounds != checksum_of_bounds(tables)) {
    refuse(
        "was made with other error bounds: give all ranks the same bounds and the same iteration, "
        "from a checkpoint too");
  }
  std::span<const std::byte> rest = in.subspan(head);
  for (const FrameTable<float>& table : tables) rest = rest.subspan(decode_table(table, rest));
  if (!rest.empty()) refuse("has " + std::to_string(rest.size()) + " bytes behind its last table");
}

}  // namespace bls
