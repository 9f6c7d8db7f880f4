#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "channel/channel.h"
#include "lookup/table.h"

namespace bls {

/// Sums or means of float rows that ids name, over bags: `lengths` is [features x samples], the ids
/// lie bag after bag, as BatchIds puts them together. A sample's sums stand side by side in the
/// order of the features. Samples come by rank: `batches[place]` of rank `order[place]`.
struct PooledRows : Lookup {
  const std::byte* lengths = nullptr;
  size_t length_bytes = 8;
  size_t length_count = 0;
  const float* weights = nullptr;  ///< one of each id, or null for none
  std::span<const int64_t> batches;
  std::span<const int> order;
};

/// Where this rank's own sums go, `stride` bytes from sample to sample; null for its slot, like
/// those of the others.
struct OwnSums {
  std::byte* data = nullptr;
  size_t stride = 0;
};

/// Looks up, sums and posts at once: each rank's sums are made in its slot, as `sum_bags` makes
/// them. This rank's own message is empty if they go elsewhere. Throws std::invalid_argument when
/// the lengths do not fit the ids or a table does not have an id; nothing is posted then.
void post_pooled_rows(Channel& channel, const PooledRows& rows, const OwnSums& own = {});

/// Writes the sums to `out`, samples one behind the other. Throws as above; nothing is written
/// then.
void sum_rows(const PooledRows& rows, std::byte* out);

}  // namespace bls
