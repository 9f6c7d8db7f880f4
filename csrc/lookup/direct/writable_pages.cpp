#include "lookup/direct/writable_pages.h"

#include <pthread.h>
#include <sys/mman.h>

#include <mutex>
#include <unordered_set>

#include "host/memory_file.h"

namespace bls {
namespace {

/// All of this process. It is never destroyed: a process may fork at its end.
struct Mapped {
  std::mutex lock;
  std::unordered_set<WritablePages*> pages;
};

Mapped& mapped() {
  static Mapped* const all = [] {
    // A thread that changes the set at a fork would leave a half of it, and the lock, to the child.
    pthread_atfork([] { mapped().lock.lock(); }, [] { mapped().lock.unlock(); },
                   [] {
                     for (WritablePages* pages : mapped().pages) pages->begin_in_child();
                     mapped().lock.unlock();
                   });
    return new Mapped;
  }();
  return *all;
}

}  // namespace

WritablePages::WritablePages(int fd, size_t bytes, const std::string& what, Children children)
    : bytes_(bytes), children_(children) {
  Mapped& all = mapped();
  const std::lock_guard guard(all.lock);  // no fork between the mapping and its place in the set
  all.pages.insert(this);
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    all.pages.erase(this);
    fail_by_errno("cannot map " + what);
  }
  if (children == Children::kHaveNone) madvise(at, bytes, MADV_DONTFORK);
  data_ = static_cast<std::byte*>(at);
}

WritablePages::~WritablePages() {
  const std::lock_guard guard(mapped().lock);
  mapped().pages.erase(this);
  if (data_ != nullptr) munmap(data_, bytes_);
}

void WritablePages::begin_in_child() noexcept {
  writable_ = false;
  if (children_ == Children::kMayRead) {
    mprotect(data_, bytes_, PROT_READ);
  } else {
    data_ = nullptr;  // something else may lie there by the time that this is destroyed
  }
}

}  // namespace bls
