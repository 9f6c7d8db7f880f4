#include "lookup/table_rows.h"

#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "channel/message_layout.h"
#include "lookup/prefetch.h"
#include "messages/message_builder.h"

namespace bls {
namespace {

constexpr size_t kBytesAhead = 8192;

/// Copies a row, and fetches one to come, a line with each line. With the size known to the
/// compiler, these are a few moves instead of a call.
template <size_t kBytes>
void copy_row(std::byte* to, const std::byte* from, const std::byte* next, size_t bytes) {
  if constexpr (kBytes == 0) {
    prefetch_row(next, bytes);
    std::memcpy(to, from, bytes);
  } else {
    for (size_t at = 0; at < kBytes; at += kCacheLine) {
      __builtin_prefetch(next + at);
      std::memcpy(to + at, from + at, kCacheLine);
    }
  }
}

/// The rows of one feature for one rank.
class GatheredRows final : public BlockWriter {
 public:
  GatheredRows(const Table& table, const std::byte* ids, size_t id_bytes, size_t count)
      : table_(table), ids_(ids), id_bytes_(id_bytes), count_(count) {}

  size_t write(std::byte* to, size_t room) const override {
    const size_t bytes = count_ * table_.row_bytes;
    if (bytes <= room) id_bytes_ == 4 ? write_any<int32_t>(to) : write_any<int64_t>(to);
    return bytes;
  }

 private:
  template <class Id>
  void write_any(std::byte* to) const {
    switch (table_.row_bytes) {
      case 64:
        return write_rows<Id, 64>(to);
      case 128:
        return write_rows<Id, 128>(to);
      case 256:
        return write_rows<Id, 256>(to);
      case 512:
        return write_rows<Id, 512>(to);
      default:
        return write_rows<Id, 0>(to);
    }
  }

  template <class Id, size_t kBytes>
  void write_rows(std::byte* to) const {
    const size_t bytes = table_.row_bytes;
    const auto row = [this](size_t i) {
      Id id;
      std::memcpy(&id, ids_ + i * sizeof(Id), sizeof(id));
      return table_.data + static_cast<size_t>(id) * table_.step();
    };
    const size_t distance = rows_ahead(kBytes > 0 ? kBytes : bytes, kBytesAhead);
    for (size_t i = 0; i < count_ && i < distance; ++i) prefetch_row(row(i), bytes);
    for (size_t i = 0; i < count_; ++i, to += bytes) {
      const size_t ahead = i + distance;
      copy_row<kBytes>(to, row(i), row(ahead < count_ ? ahead : count_ - 1), bytes);
    }
  }

  const Table& table_;
  const std::byte* ids_;
  size_t id_bytes_;
  size_t count_;
};

void check(const TableRows& rows) {
  const size_t world = rows.groups.order.size();
  const size_t features = rows.groups.features();
  if (features != rows.tables.size()) {
    throw std::invalid_argument(std::to_string(rows.tables.size()) + " tables for " +
                                std::to_string(features) + " features");
  }
  std::vector<int64_t> counts(features, 0);
  for (size_t i = 0; i < rows.groups.counts.size(); ++i) counts[i / world] += rows.groups.counts[i];
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (total != static_cast<int64_t>(rows.count)) {
    throw std::invalid_argument("the lookup is of " + std::to_string(total) + " ids, but " +
                                std::to_string(rows.count) + " were given");
  }
  check_lookup(rows, counts);
}

void check_sizes(const TableRows& rows) {
  for (const Table& table : rows.tables) {
    if (table.row_bytes != rows.groups.row_bytes) {
      throw std::invalid_argument("a table has rows of " + std::to_string(table.row_bytes) +
                                  " bytes, the lookup " + std::to_string(rows.groups.row_bytes));
    }
  }
}

/// Puts the rows of each rank into the message to it.
class RowMessages {
 public:
  explicit RowMessages(const TableRows& rows)
      : builder_(MessageBuilder::of_one_part(rows.groups.order.size(), rows.groups.features())) {
    const size_t world = rows.groups.order.size();
    gathered_.reserve(world * rows.groups.features());  // blocks point into it
    const std::byte* ids = rows.ids;
    for (size_t feature = 0; feature < rows.groups.features(); ++feature) {
      for (size_t place = 0; place < world; ++place) {
        const auto count = static_cast<size_t>(rows.groups.counts[feature * world + place]);
        gathered_.emplace_back(rows.tables[feature], ids, rows.id_bytes, count);
        Block& block = builder_.block(static_cast<size_t>(rows.groups.order[place]), feature);
        block.row_bytes = rows.tables[feature].row_bytes;
        block.rows = count;
        block.writer = &gathered_.back();
        ids += count * rows.id_bytes;
      }
    }
  }

  MessageBuilder& builder() { return builder_; }

 private:
  std::vector<GatheredRows> gathered_;
  MessageBuilder builder_;
};

}  // namespace

void copy_table_rows(const TableRows& rows, std::byte* out) {
  check(rows);
  check_sizes(rows);
  const size_t world = rows.groups.order.size(), row_bytes = rows.groups.row_bytes;
  const std::byte* ids = rows.ids;
  for (size_t feature = 0; feature < rows.groups.features(); ++feature) {
    const auto of_feature = rows.groups.counts.subspan(feature * world, world);
    const auto count =
        static_cast<size_t>(std::accumulate(of_feature.begin(), of_feature.end(), int64_t{0}));
    GatheredRows(rows.tables[feature], ids, rows.id_bytes, count).write(out, count * row_bytes);
    ids += count * rows.id_bytes;
    out += count * row_bytes;
  }
}

void post_table_rows(Channel& channel, const TableRows& rows, std::byte* own) {
  check(rows);
  check_sizes(rows);
  RowMessages messages(rows);
  MessageBuilder& builder = messages.builder();
  const auto self = static_cast<size_t>(channel.config().rank);
  const Part own_rows = builder.messages()[self][0];
  builder.clear(self);
  channel.post(builder.messages());
  // The other ranks wait for theirs.
  copy_blocks(own, bytes_of(own_rows), own_rows);
}

void post_stored_rows(Channel& channel, const TableRows& rows) {
  check(rows);
  RowMessages messages(rows);
  channel.post(messages.builder().messages());
}

}  // namespace bls
