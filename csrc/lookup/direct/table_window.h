#pragma once

#include <cstddef>
#include <span>

#include "lookup/direct/table_segment.h"

namespace bls {

/// A piece of a segment, in whole pages.
struct SegmentPages {
  const TableSegment* segment = nullptr;
  size_t offset = 0;  ///< in the segment
  size_t bytes = 0;
};

/// Pieces of the segments of several ranks, mapped one behind the other, so that a table that lies
/// in all of them has one address. Those of a segment that is refreshed can only be read, and show
/// what its creator writes. A page of 2 MiB stays one where its place in the window is a multiple
/// of 2 MiB, as its place in the segment is.
class TableWindow {
 public:
  enum class Pages {
    /// Those that are written to become this process's own; no segment sees it (see PrivatePages
    /// for those of the host's pool). But those of a segment that is refreshed are shared.
    kPrivate,
    /// They are read alone. A driver that takes hold of them copies none.
    kShared,
  };

  /// Maps the pieces in their order. Throws std::invalid_argument for a piece that is not of whole
  /// pages or not in its segment, ChannelError without address space.
  explicit TableWindow(std::span<const SegmentPages> pieces, Pages pages = Pages::kPrivate);
  TableWindow(TableWindow&& other) noexcept;
  TableWindow& operator=(TableWindow&&) = delete;
  ~TableWindow();

  /// Has all pages there, for lookups that read through this window. Until then it takes addresses
  /// alone.
  void populate() const;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool is_read_only() const { return pages_ == Pages::kShared; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  Pages pages_;
  size_t page_ = kHugePage;  // the smallest one
};

}  // namespace bls
