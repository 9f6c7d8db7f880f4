#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "host/memory_file.h"
#include "transport/transport.h"

namespace bls {

/// See MemoryFileAddress.
using SegmentAddress = MemoryFileAddress;
static_assert(sizeof(SegmentAddress) == sizeof(MemoryAddress) &&
              offsetof(SegmentAddress, bytes) == offsetof(MemoryAddress, bytes));

/// Memory that the ranks of a host write to, without a name and of a sealed size.
class ShmSegment {
 public:
  /// `purpose` goes into the error message where there is no memory.
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
  Descriptor file_;
  SegmentAddress address_;
};

}  // namespace bls
