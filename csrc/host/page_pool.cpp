#include "host/page_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <optional>
#include <utility>

namespace bls {
namespace {

constexpr size_t kPage = size_t{1} << 21;
// A block is not given to who asks for a small part of it: a larger request will come.
constexpr size_t kMostWaste = 4;

/// `bytes` is a multiple of kPage.
std::byte* map(size_t bytes) {
  // One page more, and what is not aligned is unmapped again.
  void* const mapped =
      mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(mapped);
  const size_t before = (kPage - reinterpret_cast<uintptr_t>(begin) % kPage) % kPage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + bytes, kPage - before);
#ifdef MADV_HUGEPAGE
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // refused where there are none
#endif
  return begin + before;
}

}  // namespace

PagePool::Block::Block(Block&& other) noexcept
    : pool_(std::move(other.pool_)),
      data_(other.data_),
      bytes_(other.bytes_),
      capacity_(other.capacity_) {}

PagePool::Block::~Block() {
  if (pool_) pool_->give_back({data_, capacity_});
}

PagePool::~PagePool() {
  for (const Memory& memory : unused_) munmap(memory.data, memory.bytes);
}

PagePool::Block PagePool::take(size_t bytes) {
  if (bytes > SIZE_MAX - 2 * kPage) throw std::bad_alloc();
  const size_t wanted = std::max(bytes + kPage - 1, kPage) / kPage * kPage;
  std::optional<Memory> found;
  {
    const std::lock_guard lock(mutex_);
    auto best = unused_.end();
    for (auto each = unused_.begin(); each != unused_.end(); ++each) {
      const bool fits = each->bytes >= wanted && each->bytes / kMostWaste <= wanted;
      if (fits && (best == unused_.end() || each->bytes < best->bytes)) best = each;
    }
    if (best != unused_.end()) {
      found = *best;
      unused_.erase(best);
    }
  }
  if (!found) found = Memory{map(wanted), wanted};
  return Block(shared_from_this(), found->data, bytes, found->bytes);
}

void PagePool::give_back(Memory memory) noexcept {
  const std::lock_guard lock(mutex_);
  unused_.push_back(memory);
  if (unused_.size() <= most_unused_) return;
  const auto smallest = std::min_element(
      unused_.begin(), unused_.end(),
      [](const Memory& one, const Memory& other) { return one.bytes < other.bytes; });
  munmap(smallest->data, smallest->bytes);
  unused_.erase(smallest);
}

}  // namespace bls
