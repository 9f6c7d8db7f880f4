#include "lookup/direct/written_rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace bls {
namespace {

/// A piece of a table.
struct Span {
  size_t end = 0;               ///< place in the table behind its last byte
  std::byte* behind = nullptr;  ///< where that byte would be
};

std::vector<Span> spans_of(std::span<const SegmentPages> pieces) {
  std::vector<Span> spans;
  size_t end = 0;
  for (const SegmentPages& piece : pieces) {
    std::byte* const data = piece.segment->writable();
    const size_t size = piece.segment->size();
    if (data == nullptr || piece.offset > size || piece.bytes > size - piece.offset) {
      throw std::invalid_argument(
          data == nullptr
              ? "rows can be written by the process alone that has made the tables to refresh them"
              : std::to_string(piece.bytes) + " bytes at " + std::to_string(piece.offset) +
                    " are not in a segment of " + std::to_string(size));
    }
    end += piece.bytes;
    spans.push_back({end, data + piece.offset + piece.bytes});
  }
  return spans;
}

}  // namespace

void write_rows(std::span<const SegmentPages> pieces, size_t row_bytes,
                std::span<const int64_t> ids, const std::byte* rows) {
  const std::vector<Span> spans = spans_of(pieces);
  const size_t bytes = spans.empty() ? 0 : spans.back().end;
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
  for (const int64_t id : ids) {
    size_t at = static_cast<size_t>(id) * row_bytes;
    const size_t end = at + row_bytes;
    auto span = std::upper_bound(spans.begin(), spans.end(), at,
                                 [](size_t place, const Span& each) { return place < each.end; });
    while (at < end) {
      const size_t step = std::min(end, span->end) - at;
      std::memcpy(span->behind - (span->end - at), rows, step);
      rows += step;
      at += step;
      ++span;
    }
  }
}

}  // namespace bls
