#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace bls {

/// Makes a block where it is to be sent from.
class BlockWriter {
 public:
  /// Writes the block if `room` bytes are enough for it, and nothing behind them if they are not.
  /// Returns its bytes either way, each time the same.
  virtual size_t write(std::byte* to, size_t room) const = 0;

 protected:
  ~BlockWriter() = default;
};

/// `rows` rows of `row_bytes` in the caller's memory, `stride` bytes from start to start; or what
/// `writer` makes, which is at least so much.
struct Block {
  const std::byte* data = nullptr;
  size_t row_bytes = 0;
  size_t rows = 1;
  size_t stride = 0;
  const BlockWriter* writer = nullptr;

  size_t bytes() const { return row_bytes * rows; }
  bool contiguous() const { return writer == nullptr && (rows <= 1 || stride == row_bytes); }
};

/// The receiver sees a part as one run of bytes: its blocks, concatenated.
using Part = std::span<const Block>;
/// What one rank gets.
using Message = std::span<const Part>;

/// The least that the blocks of a part take, and without writers what they take.
inline size_t bytes_of(const Part& part) {
  size_t bytes = 0;
  for (const Block& block : part) bytes += block.bytes();
  return bytes;
}

/// The block that a part consists of, where that is one run of bytes; otherwise null.
inline const Block* only_run(const Part& part) {
  return part.size() == 1 && part[0].contiguous() ? &part[0] : nullptr;
}

/// What the blocks of a part take. Their writers may have to do most of their work for that.
size_t measure(const Part& part);

/// Copies rows that do not lie one behind the other, or has them made, if `room` bytes are enough.
/// Returns how many they take.
size_t copy_rows(std::byte* to, size_t room, const Block& block);

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

/// Copies the blocks of a part one behind the other. Returns how many bytes they take, or more than
/// `room` if that is not enough; they are not all there then.
inline size_t copy_blocks(std::byte* to, size_t room, const Part& part) {
  if (bytes_of(part) > room) return SIZE_MAX;
  size_t at = 0;
  for (const Block& block : part) {
    size_t bytes = block.bytes();
    if (bytes > room - at) return SIZE_MAX;
    if (!block.contiguous()) {
      bytes = copy_rows(to + at, room - at, block);
      if (bytes > room - at) return SIZE_MAX;
    } else if (bytes != 0) {
      copy_bytes(to + at, block.data, bytes);
    }
    at += bytes;
  }
  return at;
}

}  // namespace bls
