#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "channel/channel.h"

namespace bls {

/// Jagged ids of one rank, feature-major as in a KeyedJaggedTensor: `lengths` is
/// [features x stride] of int32 or int64, `values` and `weights` hold `count` items.
struct JaggedIds {
  const std::byte* lengths = nullptr;
  size_t length_bytes = 8;
  const std::byte* values = nullptr;
  size_t value_bytes = 8;
  const std::byte* weights = nullptr;  ///< null when unweighted
  size_t weight_bytes = 0;
  size_t features = 0;
  size_t stride = 0;  ///< batch size of this rank
  size_t count = 0;
};

struct IdsPreamble;

/// What a rank tells all others along with its ids.
struct IdsNote {
  bool ended = false;                           ///< it has no batch any more
  std::optional<std::string> refusal;           ///< why no rank may go on with this batch
  uint64_t updates = 0;                         ///< of the weights, which it has ready
  std::array<uint64_t, 3> wanted_slot_bytes{};  ///< for ids, embeddings, gradients; 0: as they are
};

/// Values per feature, [features]. Throws std::invalid_argument when a length is negative or the
/// lengths do not add up to `count`.
std::vector<int64_t> values_per_feature(const JaggedIds& ids);

/// Posts to each rank the next `features_per_rank[d]` features, lengths and values in one message.
/// `order` names the features for all ranks, one after the other, and may repeat or leave out some;
/// empty, it is 0, 1, 2, ... Returns the number of values sent to each rank.
/// A batch is refused without samples: throws std::invalid_argument otherwise.
std::vector<int64_t> post_ids(Channel& channel, const JaggedIds& ids,
                              std::span<const size_t> features_per_rank,
                              std::span<const size_t> order = {}, const IdsNote& note = {});

/// The ids that all ranks sent for this rank's features, before they are put together.
class ArrivedIds {
 public:
  /// Checks every message against `features` and against the item sizes of the first in `order`
  /// that has samples; item sizes are 0 where none has. Throws ChannelError(kProtocol) naming the
  /// rank whose message does not fit.
  ArrivedIds(const Arrival& arrival, size_t features, std::span<const int> order);

  size_t features() const { return features_; }
  bool weighted() const { return weight_bytes_ != 0; }
  size_t length_bytes() const { return length_bytes_; }
  size_t value_bytes() const { return value_bytes_; }
  size_t weight_bytes() const { return weight_bytes_; }
  int64_t total_stride() const { return total_stride_; }
  int64_t total_values() const { return total_values_; }
  /// By rank.
  const std::vector<int64_t>& strides() const { return strides_; }
  const std::vector<int64_t>& values_per_source() const { return values_per_source_; }
  /// [features][world size], the second in `order`.
  const std::vector<int64_t>& counts() const { return counts_; }

  /// Whether no rank has a batch any more.
  bool all_ended() const { return all_ended_; }
  /// Updates of the weights that all ranks have ready.
  uint64_t updates() const { return updates_; }
  /// The largest of all ranks.
  const std::array<uint64_t, 3>& wanted_slot_bytes() const { return wanted_slot_bytes_; }
  /// Why ranks refuse their batch, by rank.
  const std::vector<std::pair<int, std::string>>& refusals() const { return refusals_; }

  /// Writes lengths, values and weights feature-major, within a feature by rank in `order`. Throws
  /// ChannelError(kProtocol) where lengths are not those that the constructor checked.
  void assemble(std::byte* lengths, std::byte* values, std::byte* weights) const;

 private:
  void read_note(int source, const IdsPreamble& preamble, std::span<const View> parts);

  const Arrival& arrival_;
  size_t features_;
  std::vector<int> order_;
  size_t length_bytes_ = 0;
  size_t value_bytes_ = 0;
  size_t weight_bytes_ = 0;
  int64_t total_stride_ = 0;
  int64_t total_values_ = 0;
  bool all_ended_ = true;
  uint64_t updates_ = UINT64_MAX;
  std::array<uint64_t, 3> wanted_slot_bytes_{};
  std::vector<std::pair<int, std::string>> refusals_;
  std::vector<int64_t> strides_;
  std::vector<int64_t> values_per_source_;
  std::vector<int64_t> counts_;
};

/// An id that has no row in its table.
struct BadId {
  size_t feature;
  int64_t position;  ///< among the values of the feature
  int64_t id;
};

/// The first id outside [0, rows[feature]), if any. `counts` are the values of each feature.
std::optional<BadId> find_bad_id(const JaggedIds& ids, std::span<const int64_t> rows,
                                 std::span<const int64_t> counts);

}  // namespace bls
