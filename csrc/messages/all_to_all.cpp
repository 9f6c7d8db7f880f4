#include "messages/all_to_all.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "errors.h"

namespace bls {

void require_size(const Arrival& arrival, int source, size_t bytes) {
  const auto parts = arrival.parts(source);
  if (parts.size() == 1 && parts[0].bytes == bytes) return;
  throw ChannelError(ErrorKind::kProtocol,
                     "rank " + std::to_string(source) + " sent " +
                         std::to_string(parts.size() == 1 ? parts[0].bytes : 0) +
                         " bytes, but this rank's output has room for " + std::to_string(bytes) +
                         " from it. What one rank sends must be what the other expects: compare "
                         "the split sizes, shapes and dtypes of the two");
}

void post_buffers(Channel& channel, std::span<const Buffer> buffers) {
  const size_t world = buffers.size();
  std::vector<Block> blocks(world);
  std::vector<Part> parts(world);
  std::vector<Message> messages(world);
  for (size_t rank = 0; rank < world; ++rank) {
    blocks[rank] = {buffers[rank].data, buffers[rank].bytes};
    parts[rank] = {&blocks[rank], 1};
    messages[rank] = {&parts[rank], 1};
  }
  channel.post(messages);
}

void collect_buffers(const Arrival& arrival, std::span<const Buffer> buffers) {
  if (buffers.size() != static_cast<size_t>(arrival.world_size())) {
    throw std::invalid_argument(std::to_string(buffers.size()) + " buffers for messages of " +
                                std::to_string(arrival.world_size()) + " ranks");
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    require_size(arrival, static_cast<int>(i), buffers[i].bytes);
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].bytes == 0) continue;
    std::memcpy(buffers[i].data, arrival.part(static_cast<int>(i), 0).data, buffers[i].bytes);
  }
}

}  // namespace bls
