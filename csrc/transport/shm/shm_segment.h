#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/transport.h"

namespace bls {

/// How another process of the same user finds a segment: by its creator's descriptor table. The
/// device and inode tell a recycled process or descriptor number from the real one.
struct SegmentAddress {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(SegmentAddress) == sizeof(MemoryAddress) &&
              offsetof(SegmentAddress, bytes) == offsetof(MemoryAddress, bytes));

/// Shared memory without a name: a memory file of mode 0600, so there is nothing to unlink, to
/// guess, or to leave behind after SIGKILL. Its size is sealed: no process can cut off what others
/// have mapped.
class ShmSegment {
 public:
  /// Reserves `bytes` (zeroed) at once, so that a lack of memory is an error here and not a SIGBUS
  /// later. `purpose` goes into the error message.
  static ShmSegment create(size_t bytes, const std::string& purpose);
  /// Maps a segment of another process (or of this one). Nothing else that the address may name is
  /// opened.
  static ShmSegment open(const SegmentAddress& address);

  ShmSegment() = default;
  ShmSegment(ShmSegment&& other) noexcept;
  ShmSegment& operator=(ShmSegment&& other) noexcept;
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;
  ~ShmSegment();

  std::byte* data() const { return data_; }
  size_t size() const { return address_.bytes; }
  const SegmentAddress& address() const { return address_; }
  /// Gives the descriptor back; the mapping stays. For use once every peer has mapped the segment.
  void close_descriptor();

 private:
  void map(int fd);

  std::byte* data_ = nullptr;
  int fd_ = -1;
  SegmentAddress address_;
};

}  // namespace bls
