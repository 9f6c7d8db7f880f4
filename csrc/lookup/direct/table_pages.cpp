#include "lookup/direct/table_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "host/memory_file.h"

namespace bls {
namespace {

// During one step other threads of the process wait with their page faults and mappings, and those
// that the scheduler has put behind this one wait as well. These are pages: one of 2 MiB takes as
// long as one of 4 KiB. No unmapping cuts a page of 2 MiB.
constexpr size_t kPopulatedAtOnce = 128, kUnmappedAtOnce = 512;
// Times a step that this thread rests after it. The scheduler may leave it on the processor of a
// thread with lookups, which loses one in so many then. Tables of 2 MiB pages take few steps, and
// delay few lookups: their new versions need not wait for as long.
constexpr int kRests = 4, kRestsOfHugePages = 1;
// A step takes less than a millisecond. One that took longer waited for a processor, or its process
// was stopped: a rest in proportion would keep new tables back as long again, and more.
constexpr std::chrono::milliseconds kLongestRest{50};
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14

thread_local bool beside_lookups = false;
std::atomic<bool> process_ends = false;

/// Calls `work(at, bytes)` for one step of at most `pages` pages after the other, until one returns
/// false.
template <class Work>
void in_steps(size_t bytes, size_t pages, size_t page, const Work& work) {
  using Clock = std::chrono::steady_clock;
  const size_t step = pages * page;
  const int rests = page == kHugePage ? kRestsOfHugePages : kRests;
  for (size_t at = 0; at < bytes; at += step) {
    if (beside_lookups && process_ends) return;
    const auto begin = Clock::now();
    if (!work(at, std::min(step, bytes - at))) return;
    if (!beside_lookups) continue;
    const Clock::duration rest = rests * (Clock::now() - begin);
    std::this_thread::sleep_for(std::min<Clock::duration>(rest, kLongestRest));
  }
}

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

std::byte* map_table_file(int fd, size_t bytes, int protection, int kind) {
  std::byte* const at = reserve_table_pages(bytes);
  if (mmap(at, bytes, protection, kind | MAP_FIXED, fd, 0) == MAP_FAILED) {
    munmap(at, whole_pages(bytes));
    fail_by_errno("cannot map " + mebibytes(bytes) + " of tables");
  }
  return at;
}

void populate_table_pages(const std::byte* data, size_t bytes, size_t page) {
  in_steps(bytes, kPopulatedAtOnce, page, [data](size_t at, size_t step) {
    return madvise(const_cast<std::byte*>(data) + at, step, kPopulateRead) == 0;
  });
}

void unmap_table_pages(const std::byte* data, size_t bytes, size_t page) noexcept {
  in_steps(bytes, kUnmappedAtOnce, page, [data](size_t at, size_t step) {
    munmap(const_cast<std::byte*>(data) + at, step);
    return true;
  });
}

void work_beside_lookups() { beside_lookups = true; }

void end_work_beside_lookups() { process_ends = true; }

}  // namespace bls
