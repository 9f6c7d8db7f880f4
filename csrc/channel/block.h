#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace bls {

/// Makes rows where they are to be sent from.
class RowWriter {
 public:
  /// Writes all rows, one behind the other.
  virtual void write(std::byte* to) const = 0;

 protected:
  ~RowWriter() = default;
};

/// `rows` rows of `row_bytes` in the caller's memory, `stride` bytes from start to start; or those
/// that `writer` makes.
struct Block {
  const std::byte* data = nullptr;
  size_t row_bytes = 0;
  size_t rows = 1;
  size_t stride = 0;
  const RowWriter* writer = nullptr;

  size_t bytes() const { return row_bytes * rows; }
  bool contiguous() const { return writer == nullptr && (rows <= 1 || stride == row_bytes); }
};

/// The receiver sees a part as one run of bytes: its blocks, concatenated.
using Part = std::span<const Block>;
/// What one rank gets.
using Message = std::span<const Part>;

inline size_t bytes_of(const Part& part) {
  size_t bytes = 0;
  for (const Block& block : part) bytes += block.bytes();
  return bytes;
}

/// The block that a part consists of, where that is one run of bytes; otherwise null.
inline const Block* only_run(const Part& part) {
  return part.size() == 1 && part[0].contiguous() ? &part[0] : nullptr;
}

/// Copies rows that do not lie one behind the other. Returns where the next block goes.
std::byte* copy_rows(std::byte* to, const Block& block);

/// memcpy without the call for the sizes of small messages.
inline void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes >= 8 && bytes <= 16) {
    uint64_t head;
    uint64_t tail;
    std::memcpy(&head, from, sizeof(head));
    std::memcpy(&tail, from + bytes - sizeof(tail), sizeof(tail));
    std::memcpy(to, &head, sizeof(head));
    std::memcpy(to + bytes - sizeof(tail), &tail, sizeof(tail));
    return;
  }
  std::memcpy(to, from, bytes);
}

/// Copies the blocks of a part one behind the other.
inline void copy_blocks(std::byte* to, const Part& part) {
  for (const Block& block : part) {
    if (block.bytes() == 0) continue;
    if (block.contiguous()) {
      copy_bytes(to, block.data, block.bytes());
      to += block.bytes();
    } else {
      to = copy_rows(to, block);
    }
  }
}

}  // namespace bls
