#include "transport/shm/shm_segment.h"

#include <sys/mman.h>

#include <utility>

namespace bls {

ShmSegment ShmSegment::create(size_t bytes, const std::string& purpose) {
  const MemoryPurpose why{purpose, "Lower the bound, slot_bytes or the batch"};
  ShmSegment segment;
  segment.file_ = create_memory_file(bytes, why);
  seal_memory_file(segment.file_.get(), Seal::kSize, why);
  segment.address_ = address_of(segment.file_.get());
  segment.map(segment.file_.get());
  return segment;
}

ShmSegment ShmSegment::open(const SegmentAddress& address) {
  const Descriptor file = open_memory_file(address, true);
  ShmSegment segment;
  segment.address_ = address;
  segment.map(file.get());
  return segment;
}

void ShmSegment::map(int fd) {
  void* memory = mmap(nullptr, address_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    fail_by_errno("cannot map " + mebibytes(address_.bytes) + " of shared memory");
  }
  // A forked child would otherwise share the ring without being a rank of it.
  madvise(memory, address_.bytes, MADV_DONTFORK);
  data_ = static_cast<std::byte*>(memory);
}

void ShmSegment::close_descriptor() { file_.close(); }

ShmSegment::ShmSegment(ShmSegment&& other) noexcept { *this = std::move(other); }

ShmSegment& ShmSegment::operator=(ShmSegment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(file_, other.file_);
  std::swap(address_, other.address_);
  return *this;
}

ShmSegment::~ShmSegment() {
  if (data_ != nullptr) munmap(data_, address_.bytes);
}

}  // namespace bls
