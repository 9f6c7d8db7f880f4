#include "lookup/direct/table_window.h"

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/memory_file.h"
#include "lookup/direct/table_pages.h"

namespace bls {
namespace {

/// `at` is the place of a piece in the window.
void check(const SegmentPages& piece, size_t at) {
  const TableSegment& segment = *piece.segment;
  const size_t page = segment.pages() == HugePages::kPool ? kHugePage : kTablePage;
  const size_t pages = whole_pages(segment.mapped_bytes());
  if (at % page == 0 && piece.offset % page == 0 && piece.bytes % page == 0 &&
      piece.offset <= pages && piece.bytes <= pages - piece.offset) {
    return;
  }
  throw std::invalid_argument(
      std::to_string(piece.bytes) + " bytes at " + std::to_string(piece.offset) + ", mapped at " +
      std::to_string(at) + ", are no whole pages of " + std::to_string(page) +
      " bytes of a segment of " + std::to_string(segment.size()) + " bytes");
}

}  // namespace

TableWindow::TableWindow(std::span<const SegmentPages> pieces, Pages pages) : pages_(pages) {
  size_t bytes = 0;
  for (const SegmentPages& piece : pieces) {
    check(piece, bytes);
    bytes += piece.bytes;
    page_ = std::min(page_, piece.segment->page_bytes());
  }
  if (bytes == 0) return;
  data_ = reserve_table_pages(bytes);
  size_ = bytes;
  std::byte* at = data_;
  for (const SegmentPages& piece : pieces) {
    if (piece.bytes == 0) continue;
    // A private mapping need not show what is written to the file later.
    const bool shared =
        pages == Pages::kShared || piece.segment->kind() == TableSegment::Kind::kRefreshed;
    const int rights = shared ? PROT_READ : PROT_READ | PROT_WRITE;
    const int kind = MAP_FIXED | (shared ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE);
    if (mmap(at, piece.bytes, rights, kind, piece.segment->descriptor(),
             static_cast<off_t>(piece.offset)) == MAP_FAILED) {
      munmap(data_, size_);
      fail_by_errno("cannot map " + mebibytes(piece.bytes) +
                    " of tables (vm.max_map_count limits the mappings of a process)");
    }
    at += piece.bytes;
  }
}

void TableWindow::populate() const { populate_table_pages(data_, size_, page_); }

TableWindow::TableWindow(TableWindow&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      pages_(other.pages_),
      page_(other.page_) {}

TableWindow::~TableWindow() {
  if (data_ != nullptr) unmap_table_pages(data_, size_, page_);
}

}  // namespace bls
