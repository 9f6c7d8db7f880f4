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
    MessageBuilder builder(world_size, world_size, world_size * blocks);
    for (size_t rank = 0; rank < world_size; ++rank) {
      builder.add_message();
      builder.add_part();
      for (size_t i = 0; i < blocks; ++i) builder.add_block({});
    }
    return builder;
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
    return blocks_[static_cast<size_t>(messages_[rank][0].data() - blocks_.data()) + index];
  }
  /// Leaves `rank` a message without parts.
  void clear(size_t rank) { messages_[rank] = {}; }

  std::span<const Message> messages() const { return messages_; }

 private:
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
