#include <algorithm>
#include <cstring>
#include <vector>

#include "lookup/direct/direct_batch.h"
#include "lookup/kernels/sum_bags.h"
#include "lookup/kernels/sum_parts.h"

namespace bls {
namespace {

/// What memory is made of that has to begin with a cache line: no vector lies across two then.
struct alignas(64) CacheLine {
  std::byte bytes[64];
};

// Bags whose rows are found at once: more fill the cache, fewer fetch fewer rows ahead.
constexpr size_t kIdsAtOnce = 2048;

/// The bags of one feature.
struct FeatureBags {
  const JaggedIds& ids;
  std::span<const size_t> starts;  ///< [samples + 1]

  const float* weights() const { return reinterpret_cast<const float*>(ids.weights); }
  size_t samples() const { return starts.size() - 1; }
};

/// Adds what blocks without a row of the bag would have sent: zeros, which make -0.0 to 0.0. A sum
/// that begins at zero is -0.0 only where a product with a weight vanished.
void add_zero(std::byte* sum, size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(float)) {
    float a;
    std::memcpy(&a, sum + at, sizeof(a));
    a += 0.0f;
    std::memcpy(sum + at, &a, sizeof(a));
  }
}

/// Sums bags of one feature after another over rows in several blocks, some bags at a time.
///
/// One for all features: its memory costs as much as the sums of a small batch.
template <class Id>
class BlockwiseSums {
 public:
  explicit BlockwiseSums(std::span<int64_t> rows_read) : rows_read_(rows_read) {}

  void write(const FeatureBags& bags, const TableColumns& columns, std::byte* to, size_t stride) {
    for (size_t first = 0; first < bags.samples();) {
      const Chunk chunk = chunk_from(bags, first);
      find_rows(bags, columns, chunk);
      chunk.longest < 2 ? sum_short_bags(bags, columns, chunk, to, stride)
                        : sum_by_block(bags, columns, chunk, to, stride);
      to += (chunk.end - first) * stride;
      first = chunk.end;
    }
  }

 private:
  /// Bags whose rows are found at once.
  struct Chunk {
    size_t first, end;
    size_t longest;  ///< ids of one of them
  };

  static Chunk chunk_from(const FeatureBags& bags, size_t first) {
    Chunk chunk{first, first, 0};
    do {
      chunk.longest = std::max(chunk.longest, bags.starts[chunk.end + 1] - bags.starts[chunk.end]);
      ++chunk.end;
    } while (chunk.end < bags.samples() &&
             bags.starts[chunk.end] - bags.starts[first] < kIdsAtOnce);
    return chunk;
  }

  void find_rows(const FeatureBags& bags, const TableColumns& columns, const Chunk& chunk) {
    const size_t begin = bags.starts[chunk.first], count = bags.starts[chunk.end] - begin;
    rows_.resize(count);
    blocks_.resize(count);
    in_block_.assign(columns.blocks.size(), 0);
    for (size_t i = 0; i < count; ++i) {
      Id id;
      std::memcpy(&id, bags.ids.values + (begin + i) * sizeof(id), sizeof(id));
      const size_t block = columns.rows_per_block.block_of(id);
      ++in_block_[block];
      blocks_[i] = static_cast<uint32_t>(block);
      rows_[i] = columns.row(id, block);
    }
    for (size_t block = 0; block < in_block_.size(); ++block) {
      rows_read_[columns.owners[block]] += in_block_[block];
    }
    starts_.clear();
    for (size_t bag = chunk.first; bag <= chunk.end; ++bag) {
      starts_.push_back(bags.starts[bag] - begin);
    }
  }

  static const float* weights_of(const FeatureBags& bags, const Chunk& chunk) {
    return bags.ids.weights != nullptr ? bags.weights() + bags.starts[chunk.first] : nullptr;
  }

  /// Bags of one row at most have it in one block.
  void sum_short_bags(const FeatureBags& bags, const TableColumns& columns, const Chunk& chunk,
                      std::byte* to, size_t stride) {
    Bags found;
    found.row_bytes = columns.row_bytes;
    found.ids = reinterpret_cast<const std::byte*>(rows_.data());
    found.id_bytes = sizeof(rows_[0]);
    found.ids_are_addresses = true;
    found.weights = weights_of(bags, chunk);
    found.starts = starts_.data();
    found.count = chunk.end - chunk.first;
    sum_bags(found, to, stride);
    if (found.weights == nullptr) return;
    for (size_t bag = 0; bag < found.count; ++bag) add_zero(to + bag * stride, columns.row_bytes);
  }

  void sum_by_block(const FeatureBags& bags, const TableColumns& columns, const Chunk& chunk,
                    std::byte* to, size_t stride) {
    sums_.resize(columns.blocks.size() * columns.row_bytes / sizeof(CacheLine) + 1);
    PartedBags found;
    found.rows = rows_.data();
    found.parts = blocks_.data();
    found.part_count = columns.blocks.size();
    found.row_bytes = columns.row_bytes;
    found.weights = weights_of(bags, chunk);
    found.starts = starts_.data();
    found.count = chunk.end - chunk.first;
    found.sums = reinterpret_cast<std::byte*>(sums_.data());
    sum_parts(found, to, stride);
  }

  std::span<int64_t> rows_read_;
  // Of the bags of a chunk.
  std::vector<const std::byte*> rows_;
  std::vector<uint32_t> blocks_;
  std::vector<size_t> starts_;
  std::vector<int64_t> in_block_;
  std::vector<CacheLine> sums_;
};

void sum_one_block(const FeatureBags& bags, const TableColumns& columns, bool means, std::byte* to,
                   size_t stride) {
  Bags of_table;
  of_table.table = columns.blocks[0];
  of_table.row_bytes = columns.row_bytes;
  of_table.ids = bags.ids.values;
  of_table.id_bytes = bags.ids.value_bytes;
  of_table.weights = bags.weights();
  of_table.starts = bags.starts.data();
  of_table.count = bags.samples();
  of_table.means = means;
  sum_bags(of_table, to, stride);
}

template <class Length>
void add_up(const std::byte* lengths, size_t start, std::vector<size_t>& starts) {
  starts[0] = start;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    Length length;
    std::memcpy(&length, lengths + i * sizeof(Length), sizeof(length));
    starts[i + 1] = starts[i] + static_cast<size_t>(length);
  }
}

template <class Id>
void sum_features(const DirectBatch& batch, size_t stride, std::span<std::byte> out) {
  const std::vector<size_t> of_keys = starts_of_keys(batch);
  const JaggedIds& ids = batch.ids;
  check_output(batch, ids.stride, stride, true, out.size());
  std::vector<size_t> starts(ids.stride + 1);
  std::vector<int64_t> rows_read(batch.rows_read.size(), 0);
  BlockwiseSums<Id> blockwise(rows_read);
  for (const ShardedFeature& feature : batch.features) {
    const std::byte* const lengths = ids.lengths + feature.key * ids.stride * ids.length_bytes;
    ids.length_bytes == 4 ? add_up<int32_t>(lengths, of_keys[feature.key], starts)
                          : add_up<int64_t>(lengths, of_keys[feature.key], starts);
    const FeatureBags bags{ids, starts};
    for (const TableColumns& columns : feature.columns) {
      std::byte* const to = out.data() + feature.out_byte + columns.column_byte;
      if (columns.blocks.size() == 1) {
        rows_read[columns.owners[0]] += batch.counts[feature.key];
        sum_one_block(bags, columns, feature.means, to, stride);
      } else {
        blockwise.write(bags, columns, to, stride);
      }
    }
  }
  add_rows_read(batch, rows_read);
}

}  // namespace

void sum_rows_directly(const DirectBatch& batch, size_t stride, std::span<std::byte> out) {
  batch.ids.value_bytes == 4 ? sum_features<int32_t>(batch, stride, out)
                             : sum_features<int64_t>(batch, stride, out);
}

}  // namespace bls
