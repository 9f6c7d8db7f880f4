#include "messages/rows/row_message.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "messages/message_builder.h"
#include "messages/rows/output_writer.h"
#include "messages/single_part.h"

namespace bls {
namespace {

const std::byte* rows_from(const Arrival& arrival, int source, uint64_t bytes) {
  return single_part(arrival, source, bytes,
                     [](const std::string& rank, uint64_t found, uint64_t expected) {
                       return "embeddings from " + rank + " do not fit: " + std::to_string(found) +
                              " bytes instead of " + std::to_string(expected) +
                              ". All ranks must shard the same module by the same plan";
                     });
}

/// Consecutive rows in memory.
struct Run {
  const std::byte* data;
  size_t rows;
};

/// The runs of `own.rank` in its own lookup, one for each feature.
void append_own_runs(std::vector<Run>& runs, const OwnRows& own, int64_t expected_rows) {
  const size_t world = own.rows.order.size();
  const std::byte* at = own.data;
  int64_t total = 0;
  for (size_t i = 0; i < own.rows.counts.size(); ++i) {
    const int64_t rows = own.rows.counts[i];
    if (own.rows.order[i % world] == own.rank) {
      runs.push_back({at, static_cast<size_t>(rows)});
      total += rows;
    }
    at += static_cast<size_t>(rows) * own.rows.row_bytes;
  }
  if (total != expected_rows) {
    throw std::invalid_argument("the lookup has " + std::to_string(total) + " rows of this rank, " +
                                std::to_string(expected_rows) + " are expected");
  }
}

void permute_rows(const OutputWriter& writer, std::byte* out, size_t row_bytes,
                  const std::vector<Run>& runs, std::span<const int64_t> permutation) {
  // One address per row of the concatenation: the random reads then need no search.
  std::vector<const std::byte*> row_address;
  row_address.reserve(permutation.size());
  for (const Run& run : runs) {
    for (size_t i = 0; i < run.rows; ++i) row_address.push_back(run.data + i * row_bytes);
  }
  for (const int64_t index : permutation) {
    if (index < 0 || static_cast<size_t>(index) >= row_address.size()) {
      throw std::invalid_argument("permutation index " + std::to_string(index) + " of " +
                                  std::to_string(row_address.size()) + " rows");
    }
    writer.copy(out, row_address[static_cast<size_t>(index)], row_bytes);
    out += row_bytes;
  }
}

void check_place(const PlacedRows& place, size_t out_bytes) {
  const bool fits = place.rows == 0 || (place.pitch > 0 && place.row_bytes <= place.pitch &&
                                        place.offset <= out_bytes &&
                                        place.rows <= (out_bytes - place.offset) / place.pitch);
  if (fits) return;
  throw std::invalid_argument(std::to_string(place.rows) + " rows of " +
                              std::to_string(place.row_bytes) + " bytes, " +
                              std::to_string(place.pitch) + " apart, at " +
                              std::to_string(place.offset) + " of " + std::to_string(out_bytes));
}

/// Returns the byte behind those that were read.
const std::byte* place_rows(const std::byte* from, std::byte* out, const PlacedRows& place) {
  const size_t padding = place.pitch - place.row_bytes;
  std::byte* to = out + place.offset;
  for (size_t row = 0; row < place.rows; ++row) {
    std::memcpy(to, from, place.row_bytes);
    std::memset(to + place.row_bytes, 0, padding);
    from += place.row_bytes;
    to += place.pitch;
  }
  return from;
}

}  // namespace

void post_grouped_rows(Channel& channel, const std::byte* data, const GroupedRows& rows,
                       bool to_self) {
  const size_t world = rows.order.size();
  const size_t features = rows.features();
  MessageBuilder builder = MessageBuilder::of_one_part(world, features);
  const std::byte* at = data;
  for (size_t feature = 0; feature < features; ++feature) {
    for (size_t place = 0; place < world; ++place) {
      const size_t bytes =
          static_cast<size_t>(rows.counts[feature * world + place]) * rows.row_bytes;
      builder.block(static_cast<size_t>(rows.order[place]), feature) = {at, bytes};
      at += bytes;
    }
  }
  if (!to_self) builder.clear(static_cast<size_t>(channel.config().rank));
  channel.post(builder.messages());
}

void collect_grouped_rows(const Arrival& arrival, std::byte* out, const GroupedRows& rows) {
  const size_t world = rows.order.size();
  const size_t features = rows.features();
  std::vector<const std::byte*> read(world);
  for (size_t place = 0; place < world; ++place) {
    uint64_t bytes = 0;
    for (size_t feature = 0; feature < features; ++feature) {
      bytes += static_cast<uint64_t>(rows.counts[feature * world + place]) * rows.row_bytes;
    }
    read[place] = rows_from(arrival, rows.order[place], bytes);
  }
  for (size_t feature = 0; feature < features; ++feature) {
    for (size_t place = 0; place < world; ++place) {
      const size_t bytes =
          static_cast<size_t>(rows.counts[feature * world + place]) * rows.row_bytes;
      if (bytes != 0) std::memcpy(out, read[place], bytes);
      read[place] += bytes;
      out += bytes;
    }
  }
}

void collect_rows(const Arrival& arrival, std::byte* out, size_t row_bytes,
                  std::span<const int64_t> rows_per_source, std::span<const int64_t> permutation,
                  const OwnRows& own) {
  std::vector<Run> runs;
  for (size_t i = 0; i < rows_per_source.size(); ++i) {
    const int source = static_cast<int>(i);
    const int64_t rows = rows_per_source[i];
    if (source == own.rank) {
      append_own_runs(runs, own, rows);
    } else {
      const uint64_t bytes = static_cast<uint64_t>(rows) * row_bytes;
      runs.push_back({rows_from(arrival, source, bytes), static_cast<size_t>(rows)});
    }
  }
  size_t rows = 0;
  for (const Run& run : runs) rows += run.rows;
  const OutputWriter writer(rows * row_bytes);
  if (!permutation.empty()) {
    permute_rows(writer, out, row_bytes, runs, permutation);
    return;
  }
  for (const Run& run : runs) {
    writer.copy(out, run.data, run.rows * row_bytes);
    out += run.rows * row_bytes;
  }
}

void collect_columns(const Arrival& arrival, std::byte* out, size_t rows, size_t out_row_bytes,
                     std::span<const ColumnGroup> groups) {
  std::vector<const std::byte*> sources(arrival.world_size());
  for (const ColumnGroup& group : groups) {
    for (int source = group.first; source < group.first + group.count; ++source) {
      sources[source] = rows_from(arrival, source, static_cast<uint64_t>(rows) * group.width_bytes);
    }
  }
  const OutputWriter writer(rows * out_row_bytes);
  for (size_t row = 0; row < rows; ++row) {
    for (const ColumnGroup& group : groups) {
      const std::span terms(sources.data() + group.first, static_cast<size_t>(group.count));
      writer.sum(out + row * out_row_bytes + group.offset_bytes, terms, row * group.width_bytes,
                 group.width_bytes);
    }
  }
}

void collect_placed_rows(const Arrival& arrival, std::byte* out, size_t out_bytes,
                         std::span<const PlacedRows> placed,
                         std::span<const size_t> blocks_per_source) {
  for (size_t source = 0; source < blocks_per_source.size(); ++source) {
    if (blocks_per_source[source] > placed.size()) {
      throw std::invalid_argument(arrival.names().of(static_cast<int>(source)) +
                                  " sends more blocks than " + std::to_string(placed.size()) +
                                  " that are left");
    }
    const auto blocks = placed.first(blocks_per_source[source]);
    placed = placed.subspan(blocks.size());
    uint64_t bytes = 0;
    for (const PlacedRows& place : blocks) {
      check_place(place, out_bytes);
      bytes += static_cast<uint64_t>(place.rows) * place.row_bytes;
    }
    const std::byte* from = rows_from(arrival, static_cast<int>(source), bytes);
    for (const PlacedRows& place : blocks) from = place_rows(from, out, place);
  }
}

}  // namespace bls
