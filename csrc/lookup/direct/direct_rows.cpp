#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "lookup/direct/direct_batch.h"
#include "lookup/prefetch.h"

namespace bls {
namespace {

constexpr size_t kBytesAhead = 8192;

/// A row, or some columns of one, on its way from a table to the output.
struct Copy {
  const std::byte* from;
  std::byte* to;
};

/// Copies of one size, done some later than they are asked for: their rows are fetched meanwhile,
/// across features, of which a small batch has few rows each.
class Copies {
 public:
  explicit Copies(size_t bytes) : bytes_(bytes), ahead_(rows_ahead(bytes, kBytesAhead)) {}

  void add(Copy copy) {
    prefetch_row(copy.from, bytes_);
    if (next_ >= ahead_) do_one(next_ - ahead_);
    waiting_[next_++ % kMost] = copy;
  }

  void finish() {
    for (size_t i = next_ > ahead_ ? next_ - ahead_ : 0; i < next_; ++i) do_one(i);
    next_ = 0;
  }

  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kMost = 64;  // what `rows_ahead` returns at most

  void do_one(size_t i) const {
    const Copy& copy = waiting_[i % kMost];
    switch (bytes_) {
      case 64:
        return std::memcpy(copy.to, copy.from, 64), void();
      case 128:
        return std::memcpy(copy.to, copy.from, 128), void();
      case 256:
        return std::memcpy(copy.to, copy.from, 256), void();
      case 512:
        return std::memcpy(copy.to, copy.from, 512), void();
      default:
        std::memcpy(copy.to, copy.from, bytes_);
    }
  }

  size_t bytes_;
  size_t ahead_;
  size_t next_ = 0;
  Copy waiting_[kMost];
};

template <class Id>
void add_columns(Copies& copies, const TableColumns& columns, const std::byte* ids, size_t count,
                 size_t row_bytes, std::byte* out, std::span<int64_t> rows_read) {
  out += columns.column_byte;
  for (size_t i = 0; i < count; ++i, out += row_bytes) {
    Id id;
    std::memcpy(&id, ids + i * sizeof(Id), sizeof(id));
    const size_t block = columns.block_of(static_cast<int64_t>(id));
    ++rows_read[columns.owners[block]];
    copies.add({columns.row(static_cast<int64_t>(id), block), out});
  }
}

}  // namespace

std::vector<size_t> starts_of_keys(const DirectBatch& batch) {
  if (batch.counts.size() != batch.ids.features) {
    throw std::invalid_argument(std::to_string(batch.counts.size()) + " counts for " +
                                std::to_string(batch.ids.features) + " keys");
  }
  std::vector<size_t> starts(batch.counts.size() + 1, 0);
  for (size_t key = 0; key < batch.counts.size(); ++key) {
    const auto count = static_cast<size_t>(batch.counts[key]);
    if (batch.counts[key] < 0 || count > batch.ids.count - starts[key]) {
      throw std::invalid_argument("key " + std::to_string(key) + " of the batch has " +
                                  std::to_string(batch.counts[key]) + " ids, of " +
                                  std::to_string(batch.ids.count) + " in all");
    }
    starts[key + 1] = starts[key] + count;
  }
  for (const ShardedFeature& feature : batch.features) {
    if (feature.key >= batch.counts.size()) {
      throw std::invalid_argument("a feature is key " + std::to_string(feature.key) + " of " +
                                  std::to_string(batch.counts.size()));
    }
    for (const TableColumns& columns : feature.columns) {
      const auto known = [&](size_t owner) { return owner < batch.rows_read.size(); };
      if (columns.owners.size() != columns.blocks.size() ||
          !std::ranges::all_of(columns.owners, known)) {
        throw std::invalid_argument("a block has none of " +
                                    std::to_string(batch.rows_read.size()) + " owners");
      }
    }
  }
  return starts;
}

void check_output(const DirectBatch& batch, size_t rows, size_t row_bytes, bool pooled,
                  size_t out_bytes) {
  const bool has_room =
      row_bytes == 0 ? out_bytes == 0 : out_bytes % row_bytes == 0 && out_bytes / row_bytes == rows;
  if (!has_room) {
    throw std::invalid_argument("an output of " + std::to_string(out_bytes) + " bytes for " +
                                std::to_string(rows) + " rows of " + std::to_string(row_bytes));
  }
  for (const ShardedFeature& feature : batch.features) {
    for (const TableColumns& columns : feature.columns) {
      const size_t first = (pooled ? feature.out_byte : 0) + columns.column_byte;
      if (first > row_bytes || columns.row_bytes > row_bytes - first) {
        throw std::invalid_argument(std::to_string(columns.row_bytes) + " bytes at " +
                                    std::to_string(first) + " of a row of " +
                                    std::to_string(row_bytes));
      }
    }
  }
}

void add_rows_read(const DirectBatch& batch, std::span<const int64_t> of_batch) {
  for (size_t owner = 0; owner < of_batch.size(); ++owner) {
    std::atomic_ref(batch.rows_read[owner]).fetch_add(of_batch[owner], std::memory_order_relaxed);
  }
}

void copy_rows_directly(const DirectBatch& batch, size_t row_bytes, std::span<std::byte> out) {
  const std::vector<size_t> starts = starts_of_keys(batch);
  size_t rows = 0;
  for (const ShardedFeature& feature : batch.features) {
    rows += static_cast<size_t>(batch.counts[feature.key]);
  }
  check_output(batch, rows, row_bytes, false, out.size());
  std::vector<int64_t> rows_read(batch.rows_read.size(), 0);
  Copies copies(row_bytes);
  std::byte* to = out.data();
  for (const ShardedFeature& feature : batch.features) {
    const size_t count = static_cast<size_t>(batch.counts[feature.key]);
    const std::byte* const ids = batch.ids.values + starts[feature.key] * batch.ids.value_bytes;
    for (const TableColumns& columns : feature.columns) {
      if (columns.row_bytes != copies.bytes()) {
        copies.finish();
        copies = Copies(columns.row_bytes);
      }
      batch.ids.value_bytes == 4
          ? add_columns<int32_t>(copies, columns, ids, count, row_bytes, to, rows_read)
          : add_columns<int64_t>(copies, columns, ids, count, row_bytes, to, rows_read);
    }
    to += count * row_bytes;
  }
  copies.finish();
  add_rows_read(batch, rows_read);
}

}  // namespace bls
