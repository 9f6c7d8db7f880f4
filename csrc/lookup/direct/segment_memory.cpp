#include "lookup/direct/segment_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>

#include "errors.h"
#include "host/numa.h"
#include "lookup/direct/table_pages.h"

namespace bls {
namespace {

constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1
// Each call makes all processors hand in pages that they hold back. A GiB takes 0.06 s so.
constexpr size_t kCollapsedAtOnce = size_t{64} << 20;
constexpr size_t kSmallPages = kHugePage / kTablePage;  // in a huge one

/// A whole file, mapped to tell the kernel where its pages shall be. A descriptor to read only has
/// no mapping that keeps the file from being sealed, not even one that a child is forked with.
class Advised {
 public:
  Advised(int fd, size_t bytes) : bytes_(bytes) {
    const Descriptor to_read(
        open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC));
    if (to_read.get() < 0) return;  // without /proc the kernel decides
    std::byte* const at = reserve_table_pages(bytes);
    if (mmap(at, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, to_read.get(), 0) == MAP_FAILED) {
      lacks_memory_ = errno == ENOMEM;
      munmap(at, whole_pages(bytes));
      return;
    }
    data_ = at;
  }
  Advised(const Advised&) = delete;
  Advised& operator=(const Advised&) = delete;
  ~Advised() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  /// Whether the host's pool has too few pages: a mapping reserves them, all or none.
  bool lacks_memory() const { return lacks_memory_; }
  /// Over how many nodes its pages are spread.
  size_t interleave() const { return data_ == nullptr ? 1 : interleave_nodes(data_, bytes_); }
  /// Whether there are pages of 2 MiB now, where small ones or none were before.
  bool collapse(size_t at, size_t bytes) const {
    return data_ != nullptr && madvise(data_ + at, bytes, kCollapse) == 0;
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_;
  bool lacks_memory_ = false;
};

/// Returns the bytes that are in pages of 2 MiB then.
size_t take_huge_pages(int fd, size_t begin, size_t end, const Advised& pages, size_t nodes,
                       const MemoryPurpose& purpose) {
  for (size_t at = begin; at < end; at += kHugePage) {
    const size_t first = at + first_small_page(at / kHugePage, nodes) * kTablePage;
    reserve_memory(fd, first, first + kTablePage, purpose);
  }
  if (pages.collapse(begin, end - begin)) return end - begin;
  size_t found = 0;
  for (size_t at = begin; at < end; at += kHugePage) {
    if (pages.collapse(at, kHugePage)) found += kHugePage;
  }
  return found;
}

/// Takes the pages of a file from `first` on. Parts that begin within a page of 2 MiB, and not
/// right behind the label, have small pages up to its end: it would be memory of nobody before
/// them, and in a window another segment lies there. Returns the bytes that are in small pages, and
/// need not be.
size_t take_pages(int fd, size_t first, size_t bytes, const Advised& pages, size_t nodes,
                  const MemoryPurpose& purpose) {
  const size_t whole = bytes / kHugePage * kHugePage;
  const size_t begin = first <= kTablePage ? 0 : (first + kHugePage - 1) / kHugePage * kHugePage;
  reserve_memory(fd, first / kTablePage * kTablePage, std::min(begin, bytes), purpose);
  size_t small = 0;
  bool has_some = true;  // memory in pieces too small stays so, and each try takes long
  for (size_t at = begin; at < whole; at += kCollapsedAtOnce) {
    const size_t end = std::min(at + kCollapsedAtOnce, whole);
    const size_t found = has_some ? take_huge_pages(fd, at, end, pages, nodes, purpose) : 0;
    has_some = found > 0;
    small += end - at - found;
    if (found < end - at) reserve_memory(fd, at, end, purpose);
  }
  reserve_memory(fd, std::max(whole, begin), bytes, purpose);
  return small;
}

[[noreturn]] void pool_is_empty(size_t bytes, const MemoryPurpose& purpose) {
  std::string pool = "there is no such pool";
  std::ifstream file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
  if (size_t pages = 0; file >> pages) pool = std::to_string(pages) + " are free";
  throw ChannelError(
      ErrorKind::kRendezvous,
      "no memory for " + purpose.what + ": " + std::to_string(bytes / kHugePage) +
          " pages of 2 MiB needed from the host's pool (hugetlb), " + pool +
          ". Fill it (as root: sysctl vm.nr_hugepages=N, at best when the host starts; in a "
          "container also its limit of hugepages-2Mi), or use huge_pages=True, which needs no "
          "pool");
}

SegmentMemory take_from_pool(size_t bytes, const MemoryPurpose& purpose) {
  const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  SegmentMemory taken{new_memory_file(purpose, true), whole};
  if (taken.file.get() < 0) pool_is_empty(whole, purpose);
  const Advised advised(taken.file.get(), whole);
  if (advised.lacks_memory()) pool_is_empty(whole, purpose);
  advised.interleave();
  for (size_t at = 0; at < whole; at += kHugePage) {
    int error;
    do {
      error = posix_fallocate(taken.file.get(), static_cast<off_t>(at), kHugePage);
    } while (error == EINTR);
    if (error == ENOSPC || error == ENOMEM) pool_is_empty(whole, purpose);
    errno = error;
    if (error != 0) fail_by_errno("cannot reserve pages of 2 MiB for " + purpose.what);
  }
  return taken;
}

}  // namespace

size_t first_small_page(size_t extent, size_t nodes) {
  // The kernel puts small page n of a file on node n modulo their number, counted from any one.
  return (extent + nodes - extent * kSmallPages % nodes) % nodes;
}

SegmentMemory take_segment_memory(size_t bytes, size_t first, HugePages pages,
                                  const MemoryPurpose& purpose) {
  if (pages == HugePages::kPool) return take_from_pool(bytes, purpose);
  check_memory_left(kTablePage + bytes - first, purpose);
  SegmentMemory taken{new_memory_file(purpose), bytes};
  const int fd = taken.file.get();
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    fail_by_errno("cannot reserve " + mebibytes(bytes) + " of shared memory for " + purpose.what);
  }
  const Advised advised(fd, bytes);
  const size_t nodes = advised.interleave();
  reserve_memory(fd, 0, kTablePage, purpose);
  if (pages == HugePages::kNo) {
    reserve_memory(fd, first, bytes, purpose);
  } else {
    taken.small_page_bytes = take_pages(fd, first, bytes, advised, nodes, purpose);
  }
  return taken;
}

}  // namespace bls
