#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "channel/channel.h"
#include "messages/ids/jagged_ids.h"

namespace bls {

/// What a rank tells all others along with its ids.
struct IdsNote {
  bool ended = false;                           ///< it has no batch any more
  std::optional<std::string> refusal;           ///< why no rank may go on with this batch
  uint64_t updates = 0;                         ///< of the weights, which it has ready
  std::array<uint64_t, 3> wanted_slot_bytes{};  ///< for ids, embeddings, gradients; 0: as they are
};

/// Posts to each rank the next `features_per_rank[d]` features, lengths and values in one message.
/// `order` names the features for all ranks, one after the other, and may repeat or leave out some;
/// empty, it is 0, 1, 2, ... Returns the number of values sent to each rank.
/// A batch is refused without samples: throws std::invalid_argument otherwise.
std::vector<int64_t> post_ids(Channel& channel, const JaggedIds& ids,
                              std::span<const size_t> features_per_rank,
                              std::span<const size_t> order = {}, const IdsNote& note = {});

}  // namespace bls
