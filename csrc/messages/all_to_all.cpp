#include "messages/all_to_all.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "messages/message_builder.h"
#include "messages/single_part.h"

namespace bls {

const std::byte* whole_part(const Arrival& arrival, int source, size_t bytes) {
  return single_part(
      arrival, source, bytes, [](const std::string& rank, uint64_t found, uint64_t expected) {
        return rank + " sent " + std::to_string(found) +
               " bytes, but this rank's output has room for " + std::to_string(expected) +
               " from it. What one rank sends must be what the other expects: compare "
               "the split sizes, shapes and dtypes of the two";
      });
}

void post_buffers(Channel& channel, std::span<const Buffer> buffers) {
  MessageBuilder builder = MessageBuilder::of_one_part(buffers.size(), 1);
  for (size_t rank = 0; rank < buffers.size(); ++rank) {
    builder.block(rank, 0) = {buffers[rank].data, buffers[rank].bytes};
  }
  channel.post(builder.messages());
}

void collect_buffers(const Arrival& arrival, std::span<const Buffer> buffers) {
  if (buffers.size() != static_cast<size_t>(arrival.world_size())) {
    throw std::invalid_argument(std::to_string(buffers.size()) + " buffers for messages of " +
                                std::to_string(arrival.world_size()) + " ranks");
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    whole_part(arrival, static_cast<int>(i), buffers[i].bytes);
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].bytes == 0) continue;
    std::memcpy(buffers[i].data, arrival.part(static_cast<int>(i), 0).data, buffers[i].bytes);
  }
}

}  // namespace bls
