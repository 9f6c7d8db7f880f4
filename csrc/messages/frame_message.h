#pragma once

#include <span>

#include "channel/channel.h"
#include "codecs/frame.h"

namespace bls {

/// The tables of the frames that go to each rank, or come from it.
template <typename T>
using Frames = std::span<const std::span<const FrameTable<T>>>;

/// Posts to each rank d the frame of `frames[d]`, encoded straight into its slot. The rows may be
/// changed as soon as this returns.
void post_frames(Channel& channel, Frames<const float> frames);

/// Decodes what each rank s posted straight from its slot into the rows of `frames[s]`.
///
/// Throws ChannelError (kProtocol), naming the rank, for a frame that is damaged or of another
/// plan.
void collect_frames(const Arrival& arrival, Frames<float> frames);

}  // namespace bls
