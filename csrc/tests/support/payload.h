#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "channel/channel.h"

namespace bls::testing {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

/// A uniform draw from [low, high].
inline size_t draw(Random& random, size_t low, size_t high) {
  return std::uniform_int_distribution<size_t>(low, high)(random);
}

/// The bytes of `text`, without its end.
Bytes bytes_of(const std::string& text);
/// `count` bytes that no other `stamp` gives.
Bytes stamped(uint64_t stamp, size_t count);
std::string text_of(const View& view);

/// The messages of one post with the memory they point to.
class Outgoing {
 public:
  explicit Outgoing(int world_size) : parts_(static_cast<size_t>(world_size)) {}

  /// Adds a part of one contiguous block.
  void add(int destination, Bytes part);
  /// Adds a part that is cut at random into blocks, some of them rows with gaps between them.
  void add_cut(int destination, const Bytes& part, Random& random);
  /// Valid as long as this object and until the next `add`.
  const std::vector<Message>& messages();

 private:
  Block keep(Bytes bytes);

  std::deque<Bytes> memory_;
  std::vector<std::vector<std::vector<Block>>> parts_;  // [destination][part][block]
  std::vector<std::vector<Part>> spans_;
  std::vector<Message> messages_;
};

/// Same text to every rank, itself included.
Outgoing to_all(int world_size, const std::string& text);

/// How large the messages of a random exchange are.
struct Sizes {
  size_t largest_part = 300;
  size_t most_parts = kMaxParts;
  /// One part in `oversized_every` is up to this large (0: none).
  size_t oversized_every = 0;
  size_t oversized_part = 20000;
};

/// What `source` sends to `destination` as its message number `sequence`: the same on both sides.
std::vector<Bytes> random_message(const Sizes& sizes, int source, int destination,
                                  uint64_t sequence);

}  // namespace bls::testing
