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
  /// Of each owner's shards, in all batches. Added to in one step, by any number of threads.
  std::span<int64_t> rows_read;
};

/// Writes the rows of all ids, feature by feature, each of `row_bytes`, to an output of exactly
/// their size. Throws std::invalid_argument where the counts do not fit the batch, `rows_read` the
/// owners, or the output the rows; nothing is written then.
void copy_rows_directly(const DirectBatch& batch, size_t row_bytes, std::span<std::byte> out);

/// Writes the sums of all bags: those of a sample side by side, `stride` bytes from sample to
/// sample. Throws as above; nothing is written then.
///
/// Rows of a bag that lie in several blocks are summed by block, each from zero, and the sums are
/// added in the order of the blocks: these are the bits of partial sums that ranks exchange.
void sum_rows_directly(const DirectBatch& batch, size_t stride, std::span<std::byte> out);

/// Where the ids of each key begin, [keys + 1]. Throws std::invalid_argument as above.
std::vector<size_t> starts_of_keys(const DirectBatch& batch);

/// Throws std::invalid_argument unless an output has `rows` of `row_bytes`, each with room for the
/// features, of which the place in the output counts only if they are `pooled`.
void check_output(const DirectBatch& batch, size_t rows, size_t row_bytes, bool pooled,
                  size_t out_bytes);

/// Adds what one batch has read.
void add_rows_read(const DirectBatch& batch, std::span<const int64_t> of_batch);

}  // namespace bls
