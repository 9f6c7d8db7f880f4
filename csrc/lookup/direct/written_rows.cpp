#include "lookup/direct/written_rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace bls {
namespace {

/// A piece of a table.
template <class Byte>
struct Span {
  size_t end = 0;          ///< place in the table behind its last byte
  Byte* behind = nullptr;  ///< where that byte would be
};

void check_is_in(const SegmentPages& piece) {
  const size_t size = piece.segment->size();
  if (piece.offset > size || piece.bytes > size - piece.offset) {
    throw std::invalid_argument(std::to_string(piece.bytes) + " bytes at " +
                                std::to_string(piece.offset) + " are not in a segment of " +
                                std::to_string(size));
  }
}

template <class Byte>
std::vector<Span<Byte>> spans_of(std::span<const SegmentPages> pieces,
                                 Byte* (TableSegment::*data)() const) {
  std::vector<Span<Byte>> spans;
  size_t end = 0;
  for (const SegmentPages& piece : pieces) {
    Byte* const bytes = (piece.segment->*data)();
    if (bytes == nullptr) {
      throw std::invalid_argument(
          "rows can be written by the process alone that has made the tables to refresh them");
    }
    check_is_in(piece);
    end += piece.bytes;
    spans.push_back({end, bytes + piece.offset + piece.bytes});
  }
  return spans;
}

void check_ids(size_t bytes, size_t row_bytes, std::span<const int64_t> ids) {
  if (row_bytes == 0 || bytes % row_bytes != 0) {
    throw std::invalid_argument("a table of " + std::to_string(bytes) + " bytes has no rows of " +
                                std::to_string(row_bytes));
  }
  const auto count = static_cast<int64_t>(bytes / row_bytes);
  for (const int64_t id : ids) {
    if (id < 0 || id >= count) {
      throw std::invalid_argument("row " + std::to_string(id) + " of a table of " +
                                  std::to_string(count));
    }
  }
}

/// Calls `write` for each row, or for each part of one that lies in several pieces: with the number
/// of the piece, the bytes up to the piece's end, and those that are to be written.
void for_each_part(std::span<const Span<std::byte>> to, size_t row_bytes,
                   std::span<const int64_t> ids, const auto& write) {
  check_ids(to.empty() ? 0 : to.back().end, row_bytes, ids);
  for (const int64_t id : ids) {
    size_t at = static_cast<size_t>(id) * row_bytes;
    const size_t end = at + row_bytes;
    auto span = std::upper_bound(to.begin(), to.end(), at,
                                 [](size_t place, const auto& each) { return place < each.end; });
    for (; at < end; ++span) {
      const size_t step = std::min(end, span->end) - at;
      write(static_cast<size_t>(span - to.begin()), span->end - at, step);
      at += step;
    }
  }
}

}  // namespace

void write_rows(std::span<const SegmentPages> pieces, size_t row_bytes,
                std::span<const int64_t> ids, const std::byte* rows) {
  const auto to = spans_of(pieces, &TableSegment::writable);
  for_each_part(to, row_bytes, ids, [&](size_t piece, size_t before_end, size_t bytes) {
    std::memcpy(to[piece].behind - before_end, rows, bytes);
    rows += bytes;
  });
}

void copy_rows(std::span<const SegmentPages> sources, std::span<const SegmentPages> pieces,
               size_t row_bytes, std::span<const int64_t> ids) {
  const auto from = spans_of(sources, &TableSegment::data);
  const auto to = spans_of(pieces, &TableSegment::writable);
  if (!std::equal(from.begin(), from.end(), to.begin(), to.end(),
                  [](const auto& one, const auto& other) { return one.end == other.end; })) {
    throw std::invalid_argument("rows can be copied between equal pieces alone");
  }
  for_each_part(to, row_bytes, ids, [&](size_t piece, size_t before_end, size_t bytes) {
    std::memcpy(to[piece].behind - before_end, from[piece].behind - before_end, bytes);
  });
}

}  // namespace bls
