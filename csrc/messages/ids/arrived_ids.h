#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "channel/message.h"

namespace bls {

struct IdsPreamble;

/// The ids that all ranks sent for this rank's features, before they are put together.
class ArrivedIds {
 public:
  /// Checks every message against `features` and against the item sizes of the first in `order`
  /// that has samples; item sizes are 0 where none has. Throws ChannelError(kProtocol) naming the
  /// rank whose message does not fit.
  ArrivedIds(const Arrival& arrival, size_t features, std::span<const int> order);

  size_t features() const { return features_; }
  /// Of the ranks within a feature.
  const std::vector<int>& order() const { return order_; }
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
  std::vector<int64_t> values_per_feature() const;

  /// Whether no rank has a batch any more.
  bool all_ended() const { return all_ended_; }
  /// Updates of the weights that all ranks have ready.
  uint64_t updates() const { return updates_; }
  /// The largest of all ranks.
  const std::array<uint64_t, 3>& wanted_slot_bytes() const { return wanted_slot_bytes_; }
  /// Why ranks refuse their batch, by rank.
  const std::vector<std::pair<int, std::string>>& refusals() const { return refusals_; }

  /// Writes lengths, values and weights feature-major, within a feature by rank in `order`, from
  /// the arrival that the constructor checked. Throws ChannelError(kProtocol) where lengths are not
  /// those of then.
  ///
  /// Returns the largest id of each feature, as `largest_id` finds it, [features].
  std::vector<int64_t> assemble(const Arrival& arrival, std::byte* lengths, std::byte* values,
                                std::byte* weights) const;

 private:
  void read_note(int source, const IdsPreamble& preamble, std::span<const View> parts);
  void check_items(int source, const IdsPreamble& preamble);
  void count_values(size_t place, const IdsPreamble& preamble, std::span<const View> parts);

  const RankNames* names_;  // only for the constructor
  size_t features_;
  std::vector<int> order_;
  int sized_by_ = 0;  // the rank that the item sizes are from
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

}  // namespace bls
