#include "messages/ids/ids_message.h"

#include <numeric>
#include <stdexcept>
#include <string>

#include "messages/ids/ids_preamble.h"
#include "messages/message_builder.h"

namespace bls {
namespace {

/// Features that follow one another in memory, and travel as one block.
struct Run {
  size_t first;
  size_t past;
};

/// Puts the features of `order` into runs.
void find_runs(std::span<const size_t> order, size_t features, std::vector<Run>& runs) {
  runs.clear();
  for (const size_t feature : order) {
    if (feature >= features) {
      throw std::invalid_argument("feature " + std::to_string(feature) + " of " +
                                  std::to_string(features));
    }
    if (runs.empty() || runs.back().past != feature) runs.push_back({feature, feature});
    ++runs.back().past;
  }
}

std::vector<size_t> checked_order(std::span<const size_t> order, size_t features,
                                  std::span<const size_t> features_per_rank) {
  std::vector<size_t> in_order(order.begin(), order.end());
  if (in_order.empty()) {
    in_order.resize(features);
    std::iota(in_order.begin(), in_order.end(), size_t{0});
  }
  const size_t wanted =
      std::accumulate(features_per_rank.begin(), features_per_rank.end(), size_t{0});
  if (wanted != in_order.size()) {
    throw std::invalid_argument(std::to_string(in_order.size()) + " features for ranks that get " +
                                std::to_string(wanted));
  }
  return in_order;
}

/// Adds a part that has a block for each run. `first_item` is where the items of a feature begin.
template <class FirstItem>
void add_items(MessageBuilder& builder, std::span<const Run> runs, const std::byte* items,
               size_t item_bytes, FirstItem first_item) {
  builder.add_part();
  for (const Run& run : runs) {
    const size_t first = first_item(run.first);
    builder.add_block({items + first * item_bytes, (first_item(run.past) - first) * item_bytes});
  }
}

}  // namespace

std::vector<int64_t> post_ids(Channel& channel, const JaggedIds& ids,
                              std::span<const size_t> features_per_rank,
                              std::span<const size_t> order, const IdsNote& note) {
  if (note.refusal && ids.stride != 0) {
    throw std::invalid_argument("a refused batch is sent without its " +
                                std::to_string(ids.stride) + " samples");
  }
  const std::vector<int64_t> counts = values_per_feature(ids);
  std::vector<size_t> first_value(ids.features + 1, 0);
  for (size_t f = 0; f < ids.features; ++f) {
    first_value[f + 1] = first_value[f] + static_cast<size_t>(counts[f]);
  }
  const std::vector<size_t> in_order = checked_order(order, ids.features, features_per_rank);
  const IdsPreamble preamble{static_cast<int64_t>(ids.stride),
                             static_cast<uint32_t>(ids.length_bytes),
                             static_cast<uint32_t>(ids.value_bytes),
                             static_cast<uint32_t>(ids.weight_bytes),
                             (note.ended ? kEnded : 0u) | (note.refusal ? kRefused : 0u),
                             note.updates,
                             note.wanted_slot_bytes};
  const auto* head = reinterpret_cast<const std::byte*>(&preamble);

  const auto length_of = [&](size_t feature) { return feature * ids.stride; };
  const auto value_of = [&](size_t feature) { return first_value[feature]; };

  const size_t world = features_per_rank.size();
  std::vector<Run> runs;
  runs.reserve(in_order.size());
  MessageBuilder builder(world, world * 4, world * 3 + in_order.size() * 3);
  std::vector<int64_t> sent(world);
  size_t next = 0;
  for (size_t rank = 0; rank < world; ++rank) {
    find_runs(std::span(in_order).subspan(next, features_per_rank[rank]), ids.features, runs);
    next += features_per_rank[rank];
    for (const Run& run : runs) {
      sent[rank] += static_cast<int64_t>(first_value[run.past] - first_value[run.first]);
    }
    builder.add_message();
    // Two blocks, as messages to oneself are read in place where a part is one block.
    builder.add_part();
    builder.add_block({head, 8});
    builder.add_block({head + 8, sizeof(preamble) - 8});
    add_items(builder, runs, ids.lengths, ids.length_bytes, length_of);
    add_items(builder, runs, ids.values, ids.value_bytes, value_of);
    if (note.refusal) {
      builder.add_part();
      builder.add_block(
          {reinterpret_cast<const std::byte*>(note.refusal->data()), note.refusal->size()});
    } else if (ids.weight_bytes != 0) {
      add_items(builder, runs, ids.weights, ids.weight_bytes, value_of);
    }
  }
  channel.post(builder.messages());
  return sent;
}

}  // namespace bls
