#include "lookup/direct/table_window.h"

#include <sys/mman.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "host/memory_file.h"
#include "lookup/direct/table_pages.h"

namespace bls {
namespace {

void check(const SegmentPages& piece) {
  const size_t size = piece.segment->size();
  const size_t pages = whole_pages(size);
  if (piece.offset % kTablePage == 0 && piece.bytes % kTablePage == 0 && piece.offset <= pages &&
      piece.bytes <= pages - piece.offset) {
    return;
  }
  throw std::invalid_argument(
      std::to_string(piece.bytes) + " bytes at " + std::to_string(piece.offset) +
      " are no whole pages of a segment of " + std::to_string(size) + " bytes");
}

}  // namespace

TableWindow::TableWindow(std::span<const SegmentPages> pieces) {
  size_t bytes = 0;
  for (const SegmentPages& piece : pieces) {
    check(piece);
    bytes += piece.bytes;
  }
  if (bytes == 0) return;
  data_ = reserve_table_pages(bytes);
  size_ = bytes;
  std::byte* at = data_;
  for (const SegmentPages& piece : pieces) {
    if (piece.bytes == 0) continue;
    if (mmap(at, piece.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED,
             piece.segment->descriptor(), static_cast<off_t>(piece.offset)) == MAP_FAILED) {
      munmap(data_, size_);
      fail_by_errno("cannot map " + mebibytes(piece.bytes) +
                    " of tables (vm.max_map_count limits the mappings of a process)");
    }
    at += piece.bytes;
  }
}

void TableWindow::populate() const { populate_table_pages(data_, size_); }

TableWindow::TableWindow(TableWindow&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

TableWindow::~TableWindow() {
  if (data_ != nullptr) unmap_table_pages(data_, size_);
}

}  // namespace bls
