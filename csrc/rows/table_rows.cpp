#include "rows/table_rows.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "rows/ids_message.h"

namespace bls {
namespace {

void check_ids(const TableRows& rows) {
  const size_t world = rows.groups.order.size();
  JaggedIds ids;
  ids.values = rows.ids;
  ids.value_bytes = rows.id_bytes;
  ids.features = rows.tables.size();
  std::vector<int64_t> limits;
  std::vector<int64_t> counts(ids.features, 0);
  for (const Table& table : rows.tables) limits.push_back(table.rows);
  for (size_t i = 0; i < rows.groups.counts.size(); ++i) counts[i / world] += rows.groups.counts[i];
  if (const auto bad = find_bad_id(ids, limits, counts)) {
    throw std::invalid_argument("id " + std::to_string(bad->id) + " of feature " +
                                std::to_string(bad->feature) + " of the lookup, whose table has " +
                                std::to_string(limits[bad->feature]) + " rows here");
  }
}

}  // namespace

void post_table_rows(Channel& channel, const TableRows& rows, std::byte* own) {
  const size_t world = rows.groups.order.size();
  const size_t features = rows.groups.features();
  const size_t row_bytes = rows.groups.row_bytes;
  if (features != rows.tables.size()) {
    throw std::invalid_argument(std::to_string(rows.tables.size()) + " tables for " +
                                std::to_string(features) + " features");
  }
  check_ids(rows);
  std::vector<Block> blocks(world * features);
  const std::byte* ids = rows.ids;
  for (size_t feature = 0; feature < features; ++feature) {
    for (size_t place = 0; place < world; ++place) {
      const auto count = static_cast<size_t>(rows.groups.counts[feature * world + place]);
      blocks[static_cast<size_t>(rows.groups.order[place]) * features + feature] = {
          rows.tables[feature].data, row_bytes, count, row_bytes, ids, rows.id_bytes};
      ids += count * rows.id_bytes;
    }
  }
  std::vector<Part> parts(world);
  std::vector<Message> messages(world);
  for (size_t rank = 0; rank < world; ++rank) {
    parts[rank] = {blocks.data() + rank * features, features};
    messages[rank] = {&parts[rank], 1};
  }
  const auto self = static_cast<size_t>(channel.config().rank);
  messages[self] = {};
  channel.post(messages);
  // The other ranks wait for theirs.
  copy_blocks(own, parts[self]);
}

}  // namespace bls
