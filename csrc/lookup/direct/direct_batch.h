#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lookup/direct/sharded_tables.h"
#include "messages/ids/jagged_ids.h"

namespace bls {

/// A batch of this rank's own samples, to be looked up in the tables of all ranks. `find_bad_id`
/// has found none in it: these functions read whatever row an id names.
struct DirectBatch {
  JaggedIds ids;                             ///< weights are floats, if there are any
  std::span<const int64_t> counts;           ///< ids of each key of the batch
  std::span<const ShardedFeature> features;  ///< in the order of the output
  std::span<int64_t> rows_read;              ///< of each owner's shards, in all batches; added to
};

/// Writes the rows of all ids, feature by feature, each of `row_bytes`. Throws
/// std::invalid_argument where the counts do not fit the batch, or `rows_read` the owners; nothing
/// is written then.
void copy_rows_directly(const DirectBatch& batch, size_t row_bytes, std::byte* out);

/// Writes the sums of all bags: those of a sample side by side, `stride` bytes from sample to
/// sample. Throws as above; nothing is written then.
///
/// Rows of a bag that lie in several blocks are summed by block, each from zero, and the sums are
/// added in the order of the blocks: these are the bits of partial sums that ranks exchange.
void sum_rows_directly(const DirectBatch& batch, size_t stride, std::byte* out);

/// Where the ids of each key begin, [keys + 1]. Throws std::invalid_argument as above.
std::vector<size_t> starts_of_keys(const DirectBatch& batch);

}  // namespace bls
