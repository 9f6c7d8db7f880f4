#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "lookup/direct/direct_batch.h"
#include "lookup/kernels/sum_bags.h"

namespace bls {
namespace {

// Bags whose rows are found at once: more fill the cache, fewer fetch fewer rows ahead.
constexpr size_t kIdsAtOnce = 2048;

/// The bags of one feature.
struct FeatureBags {
  const JaggedIds& ids;
  std::span<const size_t> starts;  ///< [samples + 1]

  const float* weights() const { return reinterpret_cast<const float*>(ids.weights); }
  size_t samples() const { return starts.size() - 1; }
};

void add(std::byte* sum, const std::byte* other, size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(float)) {
    float a, b;
    std::memcpy(&a, sum + at, sizeof(a));
    std::memcpy(&b, other + at, sizeof(b));
    a += b;
    std::memcpy(sum + at, &a, sizeof(a));
  }
}

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
    bags_ = &bags;
    columns_ = &columns;
    in_block_.resize(columns.blocks.size());
    for (size_t first = 0; first < bags.samples();) {
      const size_t end = find_rows(first);
      const size_t bags = end - first;
      if (starts_.size() == bags + 1) {  // each in one block
        sum_up(to, stride);
        if (weighted()) {
          for (size_t bag = 0; bag < bags; ++bag) add_zero(to + bag * stride, columns_->row_bytes);
        }
      } else {
        sums_.resize((starts_.size() - 1) * columns_->row_bytes);
        sum_up(sums_.data(), columns_->row_bytes);
        put_together(to, stride);
      }
      to += bags * stride;
      first = end;
    }
  }

 private:
  bool weighted() const { return bags_->ids.weights != nullptr; }

  Id id(size_t at) const {
    Id id;
    std::memcpy(&id, bags_->ids.values + at * sizeof(id), sizeof(id));
    return id;
  }

  /// Finds the rows of some bags, and returns where the next ones begin.
  size_t find_rows(size_t first) {
    const std::span<const size_t> starts = bags_->starts;
    const size_t begin = starts[first];
    size_t end = first, longest = 0;
    do {
      longest = std::max(longest, starts[end + 1] - starts[end]);
      ++end;
    } while (end < bags_->samples() && starts[end] - begin < kIdsAtOnce);
    const size_t count = starts[end] - begin;
    rows_.resize(count);
    weights_.resize(weighted() ? count : 0);
    starts_.clear();
    if (longest < 2) {
      take_in_order(begin, count);
      for (size_t bag = first; bag <= end; ++bag) starts_.push_back(starts[bag] - begin);
      return end;
    }
    starts_.push_back(0);
    parts_.clear();
    for (size_t bag = first; bag < end; ++bag) {
      const size_t from = starts[bag], ids = starts[bag + 1] - from;
      ids < 2 ? add_short_bag(from, ids) : add_long_bag(from, ids);
    }
    return end;
  }

  /// Bags of one row at most have nothing to order.
  void take_in_order(size_t begin, size_t count) {
    std::fill(in_block_.begin(), in_block_.end(), 0);
    for (size_t i = 0; i < count; ++i) {
      const Id row = id(begin + i);
      const size_t block = columns_->rows_per_block.block_of(row);
      ++in_block_[block];
      rows_[i] = columns_->row(row, block);
    }
    if (weighted()) std::copy_n(bags_->weights() + begin, count, weights_.begin());
    for (size_t block = 0; block < in_block_.size(); ++block) {
      rows_read_[columns_->owners[block]] += static_cast<int64_t>(in_block_[block]);
    }
  }

  void add_short_bag(size_t begin, size_t count) {
    const size_t at = starts_.back();
    if (count == 1) {
      const size_t block = columns_->rows_per_block.block_of(id(begin));
      ++rows_read_[columns_->owners[block]];
      put(at, begin, block);
    }
    starts_.push_back(at + count);
    parts_.push_back(1);
  }

  /// Puts the rows of a bag in the order of their blocks, and within a block in that of the ids.
  void add_long_bag(size_t begin, size_t count) {
    std::fill(in_block_.begin(), in_block_.end(), 0);
    if (blocks_.size() < count) blocks_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      blocks_[i] = columns_->rows_per_block.block_of(id(begin + i));
      ++in_block_[blocks_[i]];
    }
    size_t parts = 0, at = starts_.back();
    for (size_t block = 0; block < in_block_.size(); ++block) {
      const size_t rows = std::exchange(in_block_[block], at);
      rows_read_[columns_->owners[block]] += static_cast<int64_t>(rows);
      at += rows;
      if (rows > 0) starts_.push_back(at), ++parts;
    }
    for (size_t i = 0; i < count; ++i) put(in_block_[blocks_[i]]++, begin + i, blocks_[i]);
    parts_.push_back(parts);
  }

  void put(size_t place, size_t i, size_t block) {
    rows_[place] = columns_->row(id(i), block);
    if (weighted()) weights_[place] = bags_->weights()[i];
  }

  /// Sums each part of a bag.
  void sum_up(std::byte* to, size_t stride) {
    Bags bags;
    bags.row_bytes = columns_->row_bytes;
    bags.ids = reinterpret_cast<const std::byte*>(rows_.data());
    bags.id_bytes = sizeof(rows_[0]);
    bags.ids_are_addresses = true;
    bags.weights = weighted() ? weights_.data() : nullptr;
    bags.starts = starts_.data();
    bags.count = starts_.size() - 1;
    sum_bags(bags, to, stride);
  }

  void put_together(std::byte* to, size_t stride) {
    const size_t bytes = columns_->row_bytes;
    const std::byte* sum = sums_.data();
    for (const size_t parts : parts_) {
      std::memcpy(to, sum, bytes);
      for (size_t part = 1; part < parts; ++part) add(to, sum + part * bytes, bytes);
      if (weighted() && parts < columns_->blocks.size()) add_zero(to, bytes);
      sum += parts * bytes;
      to += stride;
    }
  }

  const FeatureBags* bags_ = nullptr;
  const TableColumns* columns_ = nullptr;
  std::span<int64_t> rows_read_;
  std::vector<size_t> in_block_;  ///< rows of a bag, and then where the next one goes
  std::vector<size_t> blocks_;    ///< of the rows of a bag
  std::vector<const std::byte*> rows_;
  std::vector<float> weights_;
  std::vector<size_t> starts_;  ///< of the parts of bags in one block each
  std::vector<size_t> parts_;   ///< of each bag
  std::vector<std::byte> sums_;
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
void sum_features(const DirectBatch& batch, size_t stride, std::byte* out) {
  const std::vector<size_t> of_keys = starts_of_keys(batch);
  const JaggedIds& ids = batch.ids;
  std::vector<size_t> starts(ids.stride + 1);
  BlockwiseSums<Id> blockwise(batch.rows_read);
  for (const ShardedFeature& feature : batch.features) {
    const std::byte* const lengths = ids.lengths + feature.key * ids.stride * ids.length_bytes;
    ids.length_bytes == 4 ? add_up<int32_t>(lengths, of_keys[feature.key], starts)
                          : add_up<int64_t>(lengths, of_keys[feature.key], starts);
    const FeatureBags bags{ids, starts};
    for (const TableColumns& columns : feature.columns) {
      std::byte* const to = out + feature.out_byte + columns.column_byte;
      if (columns.blocks.size() == 1) {
        batch.rows_read[columns.owners[0]] += batch.counts[feature.key];
        sum_one_block(bags, columns, feature.means, to, stride);
      } else {
        blockwise.write(bags, columns, to, stride);
      }
    }
  }
}

}  // namespace

void sum_rows_directly(const DirectBatch& batch, size_t stride, std::byte* out) {
  batch.ids.value_bytes == 4 ? sum_features<int32_t>(batch, stride, out)
                             : sum_features<int64_t>(batch, stride, out);
}

}  // namespace bls
