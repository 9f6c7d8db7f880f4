#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <span>

#include "messages/ids/arrived_ids.h"
#include "messages/ids/batch_ids.h"
#include "messages/ids/ids_message.h"
#include "tests/messages/ids_of.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// Bytes of one item of each kind.
struct ItemBytes {
  size_t length = 8;
  size_t value = 8;
  size_t weight = 0;
};

/// What one rank holds before the exchange: [feature][sample] bags of (id, weight).
struct Bags {
  std::vector<std::vector<std::vector<std::pair<int64_t, float>>>> features;
  size_t stride = 0;
};

Bags random_bags(int rank, size_t features) {
  Random random(static_cast<uint64_t>(rank) + 11);
  Bags bags;
  bags.stride = draw(random, 0, 5);
  bags.features.resize(features);
  for (auto& feature : bags.features) {
    feature.resize(bags.stride);
    if (draw(random, 0, 3) == 0) continue;  // an empty feature
    for (auto& bag : feature) {
      bag.resize(draw(random, 0, 3));
      for (auto& [id, weight] : bag) {
        id = static_cast<int64_t>(draw(random, 0, 1000));
        weight = static_cast<float>(draw(random, 0, 1000)) / 7;
      }
    }
  }
  return bags;
}

void append(Bytes& bytes, int64_t number, size_t item_bytes) {
  const auto narrow = static_cast<int32_t>(number);
  const void* from = item_bytes == 4 ? static_cast<const void*>(&narrow) : &number;
  const auto* data = static_cast<const std::byte*>(from);
  bytes.insert(bytes.end(), data, data + item_bytes);
}

void append(Bytes& bytes, float number) {
  const auto* data = reinterpret_cast<const std::byte*>(&number);
  bytes.insert(bytes.end(), data, data + sizeof(number));
}

/// Lengths, values and weights as they lie in memory.
struct Encoded {
  Bytes lengths;
  Bytes values;
  Bytes weights;
  size_t count = 0;

  void add(const std::vector<std::vector<std::pair<int64_t, float>>>& feature,
           const ItemBytes& items) {
    for (const auto& bag : feature) {
      append(lengths, static_cast<int64_t>(bag.size()), items.length);
      count += bag.size();
      for (const auto& [id, weight] : bag) {
        append(values, id, items.value);
        if (items.weight != 0) append(weights, weight);
      }
    }
  }

  JaggedIds view(size_t features, size_t stride, const ItemBytes& items) const {
    return {lengths.data(), items.length, values.data(), items.value, weights.data(),
            items.weight,   features,     stride,        count};
  }
};

Encoded encode(const Bags& bags, const ItemBytes& items) {
  Encoded encoded;
  for (const auto& feature : bags.features) encoded.add(feature, items);
  return encoded;
}

/// Orders as TorchRec's: of one node first (staggered), or by rank.
std::vector<int> order_of(int world_size, int first) {
  std::vector<int> order(static_cast<size_t>(world_size));
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin(), order.begin() + first, order.end());
  if (world_size > 3) std::swap(order[1], order[2]);
  return order;
}

/// With `shuffled`, the features do not lie in memory in the order in which they are sent.
void exchange_ids(const std::vector<size_t>& features_per_rank, const ItemBytes& items,
                  bool shuffled = false) {
  const int world_size = static_cast<int>(features_per_rank.size());
  const size_t features = std::accumulate(features_per_rank.begin(), features_per_rank.end(), 0ul);
  Ranks ranks({.world_size = world_size, .slot_bytes = 1024});
  ranks.run([&](int rank, Channel& channel) {
    const Bags own = random_bags(rank, features);
    std::vector<size_t> place(features);
    std::iota(place.begin(), place.end(), size_t{0});
    if (shuffled) std::shuffle(place.begin(), place.end(), Random(static_cast<uint64_t>(rank)));
    Bags in_memory = own;
    for (size_t f = 0; f < features; ++f) in_memory.features[place[f]] = own.features[f];
    const Encoded ids = encode(in_memory, items);
    const auto sent = post_ids(channel, ids.view(features, own.stride, items), features_per_rank,
                               shuffled ? place : std::vector<size_t>{});
    expect(std::accumulate(sent.begin(), sent.end(), int64_t{0}) == static_cast<int64_t>(ids.count),
           "number of values sent");

    const size_t mine = features_per_rank[static_cast<size_t>(rank)];
    const size_t first =
        std::accumulate(features_per_rank.begin(), features_per_rank.begin() + rank, size_t{0});
    const std::vector<int> order = order_of(world_size, rank);
    BatchIds batch(channel.wait(), mine, order);
    channel.release();
    const ArrivedIds& arrived = batch.arrived();
    Encoded expected;
    std::vector<int64_t> counts, largest;
    int64_t total_stride = 0;
    for (size_t feature = first; feature < first + mine; ++feature) {
      largest.push_back(0);
      for (const int source : order) {
        const auto bags = random_bags(source, features).features[feature];
        for (const auto& bag : bags) {
          for (const auto& [id, weight] : bag) largest.back() = std::max(largest.back(), id);
        }
        const size_t before = expected.count;
        expected.add(bags, items);
        counts.push_back(static_cast<int64_t>(expected.count - before));
      }
    }
    for (int source = 0; source < world_size; ++source) {
      const auto stride = static_cast<int64_t>(random_bags(source, features).stride);
      expect(arrived.strides()[static_cast<size_t>(source)] == stride, "stride");
      total_stride += stride;
    }
    expect(arrived.counts() == counts, "counts");
    expect(arrived.total_stride() == total_stride, "total stride");
    expect(arrived.total_values() == static_cast<int64_t>(expected.count), "total values");
    const ItemBytes there = total_stride == 0 ? ItemBytes{0, 0, 0} : items;
    expect(arrived.length_bytes() == there.length && arrived.value_bytes() == there.value &&
               arrived.weight_bytes() == there.weight,
           "item sizes");
    const auto holds = [](const std::shared_ptr<IdsMemory>& memory, const Bytes& wanted) {
      return std::ranges::equal(std::span(memory->data.get(), memory->bytes), wanted);
    };
    expect(holds(batch.lengths(), expected.lengths), "lengths");
    expect(holds(batch.values(), expected.values), "values");
    expect(holds(batch.weights(), expected.weights), "weights");
    expect(std::ranges::equal(batch.largest(), largest), "largest ids");
    expect(batch.expose_values() == batch.values() && batch.largest().empty(),
           "nothing is known of ids that others may change");
    for (size_t at = 0; at < order.size(); ++at) {
      const auto source = static_cast<size_t>(order[at]);
      expect(batch.batches()[at] == arrived.strides()[source], "batch by place");
    }
  });
}

}  // namespace

TEST_CASE("ids arrive feature by feature, within a feature in the order asked for") {
  const std::vector<size_t> splits[] = {{3}, {2, 1}, {0, 4}, {1, 2, 3}, {0, 0, 5}, {2, 0, 1, 3, 1}};
  for (const auto& features_per_rank : splits) {
    for (const size_t length : {4, 8}) {
      for (const size_t value : {4, 8}) {
        for (const size_t weight : {0, 4}) {
          REQUIRE_NOTHROW(exchange_ids(features_per_rank, {length, value, weight}));
          REQUIRE_NOTHROW(exchange_ids(features_per_rank, {length, value, weight}, true));
        }
      }
    }
  }
}

TEST_CASE("what ranks tell along with their ids is put together") {
  const std::vector<size_t> features_per_rank{2, 0, 0};
  const auto exchange = [&](const std::vector<IdsNote>& notes, auto check) {
    Ranks ranks({.world_size = 3, .slot_bytes = 1024});
    ranks.run([&](int rank, Channel& channel) {
      JaggedIds none;
      none.features = 2;
      post_ids(channel, none, features_per_rank, {}, notes[static_cast<size_t>(rank)]);
      const int order[] = {2, 0, 1};
      check(ArrivedIds(channel.wait(), features_per_rank[static_cast<size_t>(rank)], order));
      channel.release();
    });
  };
  exchange({{true, {}, 3, {1, 20, 0}}, {true, {}, 2, {10, 2, 0}}, {true, {}, 5, {}}},
           [](const ArrivedIds& arrived) {
             expect(arrived.all_ended(), "all have ended");
             expect(arrived.updates() == 2, "the fewest updates");
             const std::array<uint64_t, 3> largest{10, 20, 0};
             expect(arrived.wanted_slot_bytes() == largest, "the largest slots");
             expect(arrived.refusals().empty(), "no refusals");
           });
  exchange({{true, {}, 0, {}}, {}, {true, "no such row", 0, {}}}, [](const ArrivedIds& arrived) {
    expect(!arrived.all_ended(), "one has not ended");
    const std::vector<std::pair<int, std::string>> refusals{{2, "no such row"}};
    expect(arrived.refusals() == refusals, "the refusal");
  });
}

TEST_CASE("a rank without samples need not know of what others' items are") {
  const std::vector<size_t> features_per_rank{1, 0};
  Ranks ranks({.slot_bytes = 1024});
  JaggedIds none;
  none.features = 1;
  none.length_bytes = 4;
  post_ids(ranks[0], none, features_per_rank);
  const std::vector<int64_t> lengths{2, 0};
  const std::vector<int64_t> values{7, 8};
  post_ids(ranks[1], ids_of(lengths, values, 1), features_per_rank);
  const int order[] = {0, 1};
  const ArrivedIds arrived(ranks[0].wait(), 1, order);
  CHECK(arrived.length_bytes() == 8);
  CHECK(arrived.strides() == std::vector<int64_t>{0, 2});
  CHECK(arrived.total_values() == 2);
}

TEST_CASE("a refused batch has no samples") {
  const std::vector<size_t> features_per_rank{1, 0};
  Ranks ranks({.slot_bytes = 1024});
  const auto failure = failure_of([&] {
    post_ids(ranks[0], ids_of({1}, {2}, 1), features_per_rank, {}, {false, "why", 0, {}});
  });
  REQUIRE(failure);
  CHECK(failure->message == "a refused batch is sent without its 1 samples");
}

TEST_CASE("lengths that a sender changes after they were checked are refused") {
  Ranks ranks(Setup{});
  for (int rank = 0; rank < 2; ++rank) {
    const ItemBytes items{.length = 4};
    Encoded encoded;
    encoded.add({{{1, 0}, {2, 0}}, {{3, 0}}}, items);
    post_ids(ranks[rank], encoded.view(1, 2, items), std::vector<size_t>{1, 0}, {});
  }
  const Arrival& arrival = ranks[0].wait();
  const std::vector<int> order{0, 1};
  const ArrivedIds ids(arrival, 1, order);
  auto* const lengths = const_cast<std::byte*>(arrival.part(1, 1).data);
  const int32_t more = 1000;
  std::memcpy(lengths, &more, sizeof(more));
  std::vector<int32_t> out_lengths(4);
  std::vector<int64_t> out_values(6);
  const auto failure = failure_of([&] {
    ids.assemble(arrival, reinterpret_cast<std::byte*>(out_lengths.data()),
                 reinterpret_cast<std::byte*>(out_values.data()), nullptr);
  });
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK(failure->message.find("ids from rank 1 do not fit: its lengths changed") !=
        std::string::npos);
}

TEST_CASE("an order of features has to fit the ranks and the ids") {
  const std::vector<size_t> features_per_rank{1, 1};
  const auto post = [&](const std::vector<size_t>& order) {
    Ranks ranks({.world_size = 2, .slot_bytes = 1024});
    return failure_of([&] {
      ranks.run([&](int, Channel& channel) {
        post_ids(channel, ids_of({1, 1, 2, 0}, {1, 2, 3, 4}, 2), features_per_rank, order);
      });
    });
  };
  CHECK(post({0}));
  CHECK(post({0, 2}));
  CHECK_FALSE(post({1, 0}));
  CHECK_FALSE(post({1, 1}));
}
