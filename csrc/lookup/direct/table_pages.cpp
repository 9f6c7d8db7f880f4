#include "lookup/direct/table_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "host/memory_file.h"

namespace bls {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// While one is populated, other threads of the process wait with their page faults.
constexpr size_t kPopulateStep = size_t{4} << 20;
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14

}  // namespace

std::byte* reserve_table_pages(size_t bytes) {
  const size_t whole = whole_pages(bytes);
  void* const room = mmap(nullptr, whole + kHugePage, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) fail_by_errno("cannot map " + mebibytes(bytes) + " of tables");
  auto* const begin = static_cast<std::byte*>(room);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, before);
  std::byte* const end = begin + before + whole;
  if (before < kHugePage) munmap(end, kHugePage - before);
  return begin + before;
}

void populate_table_pages(const std::byte* data, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kPopulateStep) {
    const size_t step = std::min(kPopulateStep, bytes - at);
    if (madvise(const_cast<std::byte*>(data) + at, step, kPopulateRead) != 0) return;
  }
}

}  // namespace bls
