#include "messages/frame_message.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "errors.h"

namespace bls {
namespace {

class FrameWriter final : public BlockWriter {
 public:
  explicit FrameWriter(std::span<const FrameTable<const float>> tables) : tables_(tables) {}

  size_t write(std::byte* to, size_t room) const override {
    return encode_frame(tables_, {to, room});
  }

 private:
  std::span<const FrameTable<const float>> tables_;
};

void check_ranks(size_t frames, int world_size) {
  if (frames == static_cast<size_t>(world_size)) return;
  throw std::invalid_argument(std::to_string(frames) + " frames for " + std::to_string(world_size) +
                              " ranks");
}

}  // namespace

void post_frames(Channel& channel, Frames<const float> frames) {
  check_ranks(frames.size(), channel.config().world_size);
  std::vector<FrameWriter> writers(frames.begin(), frames.end());
  std::vector<Block> blocks(frames.size());
  std::vector<Part> parts(frames.size());
  std::vector<Message> messages(frames.size());
  for (size_t rank = 0; rank < frames.size(); ++rank) {
    blocks[rank].row_bytes = usual_frame_bytes(frames[rank]);
    blocks[rank].writer = &writers[rank];
    parts[rank] = {&blocks[rank], 1};
    messages[rank] = {&parts[rank], 1};
  }
  channel.post(messages);
}

void collect_frames(const Arrival& arrival, Frames<float> frames) {
  check_ranks(frames.size(), arrival.world_size());
  for (int source = 0; source < arrival.world_size(); ++source) {
    const auto parts = arrival.parts(source);
    const std::string rank = "rank " + std::to_string(source);
    if (parts.size() != 1) {
      throw ChannelError(ErrorKind::kProtocol,
                         rank + " sent " + std::to_string(parts.size()) +
                             " parts in place of a frame of encoded rows. All ranks must shard the "
                             "same module by the same plan, with the same codecs");
    }
    try {
      decode_frame({parts[0].data, parts[0].bytes}, frames[static_cast<size_t>(source)]);
    } catch (const ChannelError& error) {
      throw ChannelError(error.kind(), "from " + rank + ", " + error.what());
    }
  }
}

}  // namespace bls
