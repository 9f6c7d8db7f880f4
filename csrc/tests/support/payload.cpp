#include "tests/support/payload.h"

#include <algorithm>
#include <cstring>

namespace bls::testing {

Bytes bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

Bytes stamped(uint64_t stamp, size_t count) {
  Bytes bytes(count);
  uint64_t state = stamp * 0x9E3779B97F4A7C15u + 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

std::string text_of(const View& view) {
  return {reinterpret_cast<const char*>(view.data), view.bytes};
}

Block Outgoing::keep(Bytes bytes) {
  memory_.push_back(std::move(bytes));
  return {memory_.back().data(), memory_.back().size()};
}

void Outgoing::add(int destination, Bytes part) {
  parts_[static_cast<size_t>(destination)].push_back({keep(std::move(part))});
}

void Outgoing::add_cut(int destination, const Bytes& part, Random& random) {
  std::vector<Block> blocks;
  size_t at = 0;
  while (at < part.size()) {
    const size_t rows = draw(random, 1, 4);
    const size_t row_bytes = draw(random, 1, std::max<size_t>(1, part.size() / 3));
    if (rows * row_bytes > part.size() - at) {
      blocks.push_back(keep(Bytes(
          part.begin() + static_cast<ptrdiff_t>(at),
          part.begin() + static_cast<ptrdiff_t>(std::min(part.size(), at + draw(random, 1, 64))))));
      at += blocks.back().row_bytes;
      continue;
    }
    const size_t stride = row_bytes + draw(random, 0, 8);
    Bytes padded((rows - 1) * stride + row_bytes, std::byte{0xEE});
    for (size_t row = 0; row < rows; ++row, at += row_bytes) {
      std::memcpy(padded.data() + row * stride, part.data() + at, row_bytes);
    }
    const Block block = keep(std::move(padded));
    blocks.push_back({block.data, row_bytes, rows, stride});
  }
  parts_[static_cast<size_t>(destination)].push_back(std::move(blocks));
}

const std::vector<Message>& Outgoing::messages() {
  spans_.clear();
  messages_.clear();
  for (const auto& parts : parts_) spans_.emplace_back(parts.begin(), parts.end());
  for (const auto& spans : spans_) messages_.emplace_back(spans);
  return messages_;
}

Outgoing to_all(int world_size, const std::string& text) {
  Outgoing outgoing(world_size);
  for (int rank = 0; rank < world_size; ++rank) outgoing.add(rank, bytes_of(text));
  return outgoing;
}

std::vector<Bytes> random_message(const Sizes& sizes, int source, int destination,
                                  uint64_t sequence) {
  const uint64_t stamp =
      (static_cast<uint64_t>(source) << 48) ^ (static_cast<uint64_t>(destination) << 32) ^ sequence;
  Random random(stamp);
  std::vector<Bytes> parts(draw(random, 0, sizes.most_parts));
  for (size_t i = 0; i < parts.size(); ++i) {
    size_t bytes = draw(random, 0, 3) == 0 ? 0 : draw(random, 1, sizes.largest_part);
    if (sizes.oversized_every != 0 && draw(random, 1, sizes.oversized_every) == 1) {
      bytes = draw(random, 1, sizes.oversized_part);
    }
    parts[i] = stamped(stamp * kMaxParts + i, bytes);
  }
  return parts;
}

}  // namespace bls::testing
