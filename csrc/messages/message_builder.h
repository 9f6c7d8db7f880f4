#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <vector>

#include "channel/message.h"

namespace bls {

/// The messages of one post, put together rank by rank, part by part and block by block.
class MessageBuilder {
 public:
  /// With room for so many of each. Messages refer to parts and parts to blocks in place, so that
  /// more throw std::logic_error.
  MessageBuilder(size_t messages, size_t parts, size_t blocks) {
    messages_.reserve(messages);
    parts_.reserve(parts);
    blocks_.reserve(blocks);
  }
  /// One part of `blocks` blocks for each rank, which `block` gives to be set.
  static MessageBuilder of_one_part(size_t world_size, size_t blocks) {
    return MessageBuilder(world_size, blocks);
  }
  MessageBuilder(MessageBuilder&&) = default;

  /// Begins the message to the next rank.
  void add_message() { add(messages_, Message(parts_.data() + parts_.size(), 0)); }
  /// Begins the next part of that message.
  void add_part() {
    add(parts_, Part(blocks_.data() + blocks_.size(), 0));
    lengthen(messages_.back());
  }
  void add_block(const Block& block) {
    add(blocks_, block);
    lengthen(parts_.back());
  }

  /// A block of the first part of the message to `rank`.
  Block& block(size_t rank, size_t index) {
    return const_cast<Block&>(messages_[rank][0][index]);  // it is one of `blocks_`
  }
  /// Leaves `rank` a message without parts.
  void clear(size_t rank) { messages_[rank] = {}; }

  std::span<const Message> messages() const { return messages_; }

 private:
  MessageBuilder(size_t world_size, size_t blocks)
      : messages_(world_size), parts_(world_size), blocks_(world_size * blocks) {
    for (size_t rank = 0; rank < world_size; ++rank) {
      parts_[rank] = {blocks_.data() + rank * blocks, blocks};
      messages_[rank] = {&parts_[rank], 1};
    }
  }
  template <class Item>
  static void add(std::vector<Item>& items, const Item& item) {
    if (items.size() == items.capacity()) throw std::logic_error("a post of more than was planned");
    items.push_back(item);
  }
  template <class Span>
  static void lengthen(Span& span) {
    span = Span(span.data(), span.size() + 1);
  }

  std::vector<Message> messages_;
  std::vector<Part> parts_;
  std::vector<Block> blocks_;
};

}  // namespace bls
