#include "lookup/pooled_rows.h"

#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "lookup/kernels/sum_bags.h"
#include "messages/ids/jagged_ids.h"
#include "messages/message_builder.h"

namespace bls {
namespace {

/// The sums of some samples.
class Sums final : public BlockWriter {
 public:
  /// `starts` is [features x samples + 1]: where the ids of each bag begin.
  Sums(const PooledRows& rows, std::span<const size_t> starts, size_t samples, size_t first,
       size_t count, size_t row_bytes)
      : rows_(rows),
        starts_(starts),
        samples_(samples),
        first_(first),
        count_(count),
        row_bytes_(row_bytes) {}

  size_t write(std::byte* to, size_t room) const override {
    const size_t bytes = count_ * row_bytes_;
    if (bytes <= room) write_all(to, row_bytes_);
    return bytes;
  }

  void write_all(std::byte* to, size_t stride) const {
    for (size_t feature = 0; feature < rows_.tables.size(); ++feature) {
      const Table& table = rows_.tables[feature];
      const Bags bags{table.data,     table.row_bytes, rows_.ids,
                      rows_.id_bytes, rows_.weights,   starts_.data() + feature * samples_ + first_,
                      count_,         table.means};
      sum_bags(bags, to, stride);
      to += table.row_bytes;
    }
  }

 private:
  const PooledRows& rows_;
  std::span<const size_t> starts_;
  size_t samples_;
  size_t first_;
  size_t count_;
  size_t row_bytes_;
};

template <class Length>
void add_up(const std::byte* lengths, std::vector<size_t>& starts) {
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    Length length;
    std::memcpy(&length, lengths + i * sizeof(Length), sizeof(length));
    starts[i + 1] = starts[i] + static_cast<size_t>(length);
  }
}

size_t samples_of(const PooledRows& rows) {
  return static_cast<size_t>(std::accumulate(rows.batches.begin(), rows.batches.end(), int64_t{0}));
}

size_t row_bytes_of(const PooledRows& rows) {
  size_t bytes = 0;
  for (const Table& table : rows.tables) bytes += table.row_bytes;
  return bytes;
}

/// Checks the lookup, and returns where the ids of each bag begin, [features x samples + 1].
std::vector<size_t> starts_of(const PooledRows& rows) {
  const size_t features = rows.tables.size(), samples = samples_of(rows);
  if (rows.length_count != features * samples) {
    throw std::invalid_argument(std::to_string(rows.length_count) + " lengths for " +
                                std::to_string(features) + " features of " +
                                std::to_string(samples) + " samples");
  }
  const JaggedIds jagged{rows.lengths, rows.length_bytes, rows.ids,  rows.id_bytes, nullptr, 0,
                         features,     samples,           rows.count};
  check_lookup(rows, values_per_feature(jagged));
  std::vector<size_t> starts(features * samples + 1, 0);
  rows.length_bytes == 4 ? add_up<int32_t>(rows.lengths, starts)
                         : add_up<int64_t>(rows.lengths, starts);
  return starts;
}

}  // namespace

void sum_rows(const PooledRows& rows, std::byte* out) {
  const std::vector<size_t> starts = starts_of(rows);
  const size_t samples = samples_of(rows), row_bytes = row_bytes_of(rows);
  Sums(rows, starts, samples, 0, samples, row_bytes).write_all(out, row_bytes);
}

void post_pooled_rows(Channel& channel, const PooledRows& rows, const OwnSums& own) {
  const size_t world = rows.order.size();
  const std::vector<size_t> starts = starts_of(rows);
  const size_t samples = samples_of(rows), row_bytes = row_bytes_of(rows);
  const auto self = static_cast<size_t>(channel.config().rank);
  const Sums* own_sums = nullptr;
  std::vector<Sums> sums;
  sums.reserve(world);  // blocks point into it
  MessageBuilder builder = MessageBuilder::of_one_part(world, 1);
  size_t first = 0;
  for (size_t place = 0; place < world; ++place) {
    const auto rank = static_cast<size_t>(rows.order[place]);
    const auto batch = static_cast<size_t>(rows.batches[place]);
    sums.emplace_back(rows, starts, samples, first, batch, row_bytes);
    Block& block = builder.block(rank, 0);
    block.row_bytes = row_bytes;
    block.rows = batch;
    block.writer = &sums.back();
    first += batch;
    if (rank == self && own.data != nullptr) own_sums = &sums.back();
  }
  if (own_sums != nullptr) builder.clear(self);
  channel.post(builder.messages());
  // The other ranks wait for theirs.
  if (own_sums != nullptr) own_sums->write_all(own.data, own.stride);
}

}  // namespace bls
