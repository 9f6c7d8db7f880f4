#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

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

/// Sum of `count` lengths of `item_bytes`. A negative length makes the result negative, and so does
/// one of 2^32 or more: no bag holds that many ids, and their sum could overflow to an innocent
/// one.
int64_t sum_lengths(const std::byte* data, size_t count, size_t item_bytes);

/// Values per feature, [features]. Throws std::invalid_argument when a length is negative or the
/// lengths do not add up to `count`.
std::vector<int64_t> values_per_feature(const JaggedIds& ids);

/// Larger than any id that a table has.
constexpr int64_t kUnknownId = std::numeric_limits<int64_t>::max();

/// The largest of `count` ids of `item_bytes`, 0 of none. kUnknownId where one is negative or has
/// more than 31 bits: to compare these takes instructions that not all processors have.
int64_t largest_id(const std::byte* ids, size_t count, size_t item_bytes);

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
