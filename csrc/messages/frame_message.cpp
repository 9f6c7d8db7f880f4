#include "messages/frame_message.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "errors.h"
#include "messages/message_builder.h"
#include "messages/single_part.h"

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
  MessageBuilder builder = MessageBuilder::of_one_part(frames.size(), 1);
  for (size_t rank = 0; rank < frames.size(); ++rank) {
    Block& block = builder.block(rank, 0);
    block.row_bytes = least_frame_bytes(frames[rank]);
    block.writer = &writers[rank];
  }
  channel.post(builder.messages());
}

void collect_frames(const Arrival& arrival, Frames<float> frames) {
  check_ranks(frames.size(), arrival.world_size());
  for (int source = 0; source < arrival.world_size(); ++source) {
    const View* const part = single_part(arrival, source);
    if (part == nullptr) {
      throw ChannelError(ErrorKind::kProtocol,
                         arrival.names().of(source) + " sent " +
                             std::to_string(arrival.parts(source).size()) +
                             " parts in place of a frame of encoded rows. All ranks must shard the "
                             "same module by the same plan, with the same codecs");
    }
    try {
      decode_frame({part->data, part->bytes}, frames[static_cast<size_t>(source)]);
    } catch (const ChannelError& error) {
      throw ChannelError(error.kind(), "from " + arrival.names().of(source) + ", " + error.what());
    }
  }
}

}  // namespace bls
