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

  int64_t id(size_t at) const {
    if (ids.value_bytes == 4) {
      int32_t id;
      std::memcpy(&id, ids.values + at * sizeof(id), sizeof(id));
      return id;
    }
    int64_t id;
    std::memcpy(&id, ids.values + at * sizeof(id), sizeof(id));
    return id;
  }

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

/// Adds what blocks without a row of the bag would have sent: zeros, which make -0.0 to 0.0.
void add_zero(std::byte* sum, size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(float)) {
    float a;
    std::memcpy(&a, sum + at, sizeof(a));
    a += 0.0f;
    std::memcpy(sum + at, &a, sizeof(a));
  }
}

/// Sums the bags of one feature over rows in several blocks, some bags at a time.
class BlockwiseSums {
 public:
  BlockwiseSums(const FeatureBags& bags, const TableColumns& columns, std::span<int64_t> rows_read)
      : bags_(bags), columns_(columns), rows_read_(rows_read), in_block_(columns.blocks.size()) {}

  void write(std::byte* to, size_t stride) {
    for (size_t first = 0; first < bags_.samples();) {
      size_t end = first;
      clear();
      do {
        add_bag(end++);
      } while (end < bags_.samples() && rows_.size() < kIdsAtOnce);
      sum_up();
      for (; first < end; ++first, to += stride) put_together(to);
    }
  }

 private:
  void clear() {
    rows_.clear();
    weights_.clear();
    starts_.assign(1, 0);
    parts_.clear();
    next_part_ = next_bag_ = 0;
  }

  /// Puts the rows of a bag in the order of their blocks, and within a block in that of the ids.
  void add_bag(size_t bag) {
    const size_t begin = bags_.starts[bag], count = bags_.starts[bag + 1] - begin;
    const size_t base = rows_.size();
    rows_.resize(base + count);
    if (bags_.ids.weights != nullptr) weights_.resize(rows_.size());
    if (count == 1) {  // nothing to order
      const size_t block = columns_.rows_per_block.block_of(bags_.id(begin));
      ++rows_read_[columns_.owners[block]];
      put(base, begin, block);
      starts_.push_back(rows_.size());
      parts_.push_back(1);
      return;
    }
    std::fill(in_block_.begin(), in_block_.end(), 0);
    if (blocks_.size() < count) blocks_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      blocks_[i] = columns_.rows_per_block.block_of(bags_.id(begin + i));
      ++in_block_[blocks_[i]];
    }
    size_t parts = 0, at = base;
    for (size_t block = 0; block < in_block_.size(); ++block) {
      const size_t rows = std::exchange(in_block_[block], at);
      rows_read_[columns_.owners[block]] += static_cast<int64_t>(rows);
      at += rows;
      if (rows > 0) starts_.push_back(at), ++parts;
    }
    for (size_t i = 0; i < count; ++i) put(in_block_[blocks_[i]]++, begin + i, blocks_[i]);
    parts_.push_back(parts);
  }

  void put(size_t place, size_t i, size_t block) {
    rows_[place] = columns_.row(bags_.id(i), block);
    if (bags_.ids.weights != nullptr) weights_[place] = bags_.weights()[i];
  }

  void sum_up() {
    Bags bags;
    bags.row_bytes = columns_.row_bytes;
    bags.ids = reinterpret_cast<const std::byte*>(rows_.data());
    bags.id_bytes = sizeof(rows_[0]);
    bags.ids_are_addresses = true;
    bags.weights = bags_.ids.weights != nullptr ? weights_.data() : nullptr;
    bags.starts = starts_.data();
    bags.count = starts_.size() - 1;
    sums_.resize(bags.count * columns_.row_bytes);
    sum_bags(bags, sums_.data(), columns_.row_bytes);
  }

  void put_together(std::byte* to) {
    const size_t bytes = columns_.row_bytes, parts = parts_[next_bag_++];
    if (parts == 0) {
      std::memset(to, 0, bytes);
      return;
    }
    std::memcpy(to, sums_.data() + next_part_++ * bytes, bytes);
    for (size_t part = 1; part < parts; ++part) {
      add(to, sums_.data() + next_part_++ * bytes, bytes);
    }
    if (parts < columns_.blocks.size()) add_zero(to, bytes);
  }

  const FeatureBags& bags_;
  const TableColumns& columns_;
  std::span<int64_t> rows_read_;
  std::vector<size_t> in_block_;  ///< rows of a bag, and then where the next one goes
  std::vector<size_t> blocks_;    ///< of the rows of a bag
  std::vector<const std::byte*> rows_;
  std::vector<float> weights_;
  std::vector<size_t> starts_;  ///< of the parts of bags in one block each
  std::vector<size_t> parts_;   ///< of each bag
  std::vector<std::byte> sums_;
  size_t next_part_ = 0;
  size_t next_bag_ = 0;
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

}  // namespace

void sum_rows_directly(const DirectBatch& batch, size_t stride, std::byte* out) {
  const std::vector<size_t> of_keys = starts_of_keys(batch);
  const JaggedIds& ids = batch.ids;
  std::vector<size_t> starts(ids.stride + 1);
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
        BlockwiseSums(bags, columns, batch.rows_read).write(to, stride);
      }
    }
  }
}

}  // namespace bls
