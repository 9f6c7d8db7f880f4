#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
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

/// Values per feature, [features]. Throws std::invalid_argument when a length is negative or the
/// lengths do not add up to `count`.
std::vector<int64_t> values_per_feature(const JaggedIds& ids);

/// Posts to each rank the next `features_per_rank[d]` features, lengths and values in one message.
/// `order` names the features for all ranks, one after the other, and may repeat or leave out some;
/// empty, it is 0, 1, 2, ... Returns the number of values sent to each rank.
std::vector<int64_t> post_ids(Channel& channel, const JaggedIds& ids,
                              std::span<const size_t> features_per_rank,
                              std::span<const size_t> order = {});

/// The ids that all ranks sent for this rank's features, before they are put together.
class ArrivedIds {
 public:
  /// Checks every message against `features` and against the item sizes of the first in `order`.
  /// Throws ChannelError(kProtocol) naming the rank whose message does not fit.
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

  /// Writes lengths, values and weights feature-major, within a feature by rank in `order`. Throws
  /// ChannelError(kProtocol) where lengths are not those that the constructor checked.
  void assemble(std::byte* lengths, std::byte* values, std::byte* weights) const;

 private:
  const Arrival& arrival_;
  size_t features_;
  std::vector<int> order_;
  size_t length_bytes_ = 0;
  size_t value_bytes_ = 0;
  size_t weight_bytes_ = 0;
  int64_t total_stride_ = 0;
  int64_t total_values_ = 0;
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
