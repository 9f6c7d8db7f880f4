#pragma once

#include <cstddef>

#include "channel/channel.h"
#include "messages/reduction.h"

namespace bls {

/// Posts that `all_reduce` has under way at most: the channel's bound is one less.
constexpr uint32_t kAllReducePosts = 2;

/// Replaces `count` elements at `data` by their reduction over all ranks, see `reduce`: in the
/// order of the ranks, so that all ranks have the same bits in every run.
///
/// All ranks call it alike, and use the channel for nothing else meanwhile. Of a call that throws,
/// `data` may be written in part.
///
/// Throws std::invalid_argument for a channel of a bound below kAllReducePosts - 1, for slots that
/// are too small, and for averages of integers. Throws ChannelError (kProtocol), and fails the
/// channel on all ranks, where ranks reduce something else.
void all_reduce(Channel& channel, Element element, Reduction reduction, std::byte* data,
                size_t count);

}  // namespace bls
