#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/rank_names.h"

namespace bls {

/// Parts of a message.
inline constexpr size_t kMaxParts = 16;

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

/// A part of a received message, in place.
struct View {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

/// The messages of one sequence number from all ranks, readable until released.
class Arrival {
 public:
  uint64_t sequence() const { return sequence_; }
  std::span<const View> parts(int source) const {
    return {views_.data() + static_cast<size_t>(source) * kMaxParts, counts_[source]};
  }
  const View& part(int source, size_t index) const {
    return views_[static_cast<size_t>(source) * kMaxParts + index];
  }
  int world_size() const { return static_cast<int>(counts_.size()); }
  const RankNames& names() const { return names_; }

 private:
  friend class Channel;
  uint64_t sequence_ = 0;
  RankNames names_;
  std::vector<View> views_;     // [source][kMaxParts]
  std::vector<size_t> counts_;  // [source]
  std::vector<std::byte> own_;  // this rank's message to itself, when it is not one block a part
};

}  // namespace bls
