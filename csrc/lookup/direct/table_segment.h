#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "host/memory_file.h"
#include "lookup/direct/segment_memory.h"
#include "lookup/direct/table_pages.h"
#include "lookup/direct/writable_pages.h"

namespace bls {

/// Whose tables a segment has, and which. Every segment begins with it, and who maps one says what
/// it expects.
struct TableLabel {
  uint32_t owner = 0;                     ///< rank
  std::string version;                    ///< of the weights, see is_version
  std::array<std::byte, 32> layout = {};  ///< digest of which shards lie where, on all ranks

  bool operator==(const TableLabel&) const = default;
};

/// Some rows of a table, to be copied into a segment.
struct TablePart {
  const std::byte* data = nullptr;
  size_t bytes = 0;
  size_t offset = 0;  ///< in the segment
};

/// Returns the next part of a segment, none after the last one. A part stays valid until the next
/// call.
using NextPart = std::function<std::optional<TablePart>()>;

/// The shards of one rank in one version, in shared memory that nobody can change any more, not
/// even its creator. Whoever maps it keeps a descriptor as well, so that it outlives its creator
/// and can be handed on.
///
/// One that is refreshed is the exception: its creator goes on writing rows to it. No other process
/// can, nor can a child of it, nor anybody after its end. The control page says which version it
/// has: see ControlPage::serial_on.
class TableSegment {
 public:
  /// Where the first part may begin.
  static constexpr size_t kFirstOffset = 4096;

  enum class Kind : uint32_t { kConstant, kRefreshed };

  /// Copies the parts, one after the other, so that they need not be in memory at once. None begins
  /// before `first`; up to there the segment has no memory but the label's. Throws
  /// std::invalid_argument for parts that overlap the label or the end and for a label of no
  /// version, ChannelError without memory.
  static TableSegment create(const TableLabel& label, const NextPart& next, size_t bytes,
                             HugePages pages, size_t first = kFirstOffset,
                             Kind kind = Kind::kConstant);
  static TableSegment create(const TableLabel& label, std::span<const TablePart> parts,
                             size_t bytes, HugePages pages);
  /// Maps what another process announced. Throws ChannelError if it is not there any more, is not
  /// sealed, or has another label.
  static TableSegment open(const MemoryFileAddress& address, const TableLabel& expected);
  /// Maps a descriptor that came through a socket, and owns it from here on. Throws as `open`.
  static TableSegment adopt(Descriptor file, const TableLabel& expected);

  TableSegment(TableSegment&& other) noexcept;
  TableSegment& operator=(TableSegment&& other) noexcept;
  TableSegment(const TableSegment&) = delete;
  TableSegment& operator=(const TableSegment&) = delete;
  ~TableSegment();

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  /// Bytes of the file, which are more than `size` if its pages are of the host's pool.
  size_t mapped_bytes() const { return mapped_bytes_; }
  /// Bytes for which its creator asked for pages of 2 MiB and got small ones.
  size_t small_page_bytes() const { return small_page_bytes_; }
  HugePages pages() const { return pages_; }
  Kind kind() const { return kind_; }
  /// Where to write to, for the creator of one that is refreshed; null in all other processes.
  std::byte* writable() const { return writable_ == nullptr ? nullptr : writable_->data(); }
  /// Bytes of its pages: of a small one if it has some that could be larger.
  size_t page_bytes() const {
    return pages_ == HugePages::kNo || small_page_bytes_ > 0 ? kTablePage : kHugePage;
  }
  int descriptor() const { return file_.get(); }
  /// By which other processes find it here.
  MemoryFileAddress address() const { return address_of(file_.get()); }

 private:
  TableSegment(Descriptor file, const TableLabel& expected);

  Descriptor file_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_bytes_ = 0;
  size_t small_page_bytes_ = 0;
  HugePages pages_ = HugePages::kNo;
  Kind kind_ = Kind::kConstant;
  std::unique_ptr<WritablePages> writable_;  // they stay where they are when the segment moves
};

/// A mapping of a segment whose pages become this process's own when they are written to. The
/// segment never sees it. A page of the host's pool needs another free one then; without it the
/// kernel ends the process (SIGBUS).
class PrivatePages {
 public:
  explicit PrivatePages(const TableSegment& segment);
  PrivatePages(PrivatePages&& other) noexcept;
  PrivatePages& operator=(PrivatePages&&) = delete;
  ~PrivatePages();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_bytes_ = 0;
};

}  // namespace bls
