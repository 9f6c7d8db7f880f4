// The ids message: what BatchIds accepts fits the memory that its figures ask for.

#include <numeric>

#include "fuzz/arrival.h"
#include "messages/ids/batch_ids.h"

namespace bls::fuzzing {
namespace {

constexpr size_t kMostFeatures = 4;

/// The first part: item sizes and batch size, right or not.
Bytes take_preamble(Input& input, int64_t stride) {
  struct {
    int64_t stride;
    uint32_t length_bytes, value_bytes, weight_bytes, flags;
    uint64_t updates, wanted_slot_bytes[3];
  } preamble{stride, 4, 8, 0, 0, 0, {}};
  const auto mode = input.take<uint8_t>();
  if (mode & 1) preamble.stride = input.take<int64_t>();
  if (mode & 2) preamble.length_bytes = 8;
  if (mode & 4) preamble.value_bytes = 4;
  if (mode & 8) preamble.weight_bytes = 4;
  if (mode & 16) preamble.length_bytes = input.take<uint32_t>();
  if (mode & 32) preamble.value_bytes = input.take<uint32_t>();
  if (mode & 64) {
    preamble.weight_bytes = input.take<uint32_t>();
    preamble.flags = input.take<uint8_t>();
    preamble.updates = input.take<uint64_t>();
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(&preamble);
  return {bytes, bytes + (mode & 128 ? input.take_up_to(sizeof(preamble)) : sizeof(preamble))};
}

std::vector<Bytes> take_message(Input& input, size_t features) {
  const size_t stride = input.take_up_to(5);
  std::vector<Bytes> parts{take_preamble(input, static_cast<int64_t>(stride))};
  const auto mode = input.take<uint8_t>();
  // Small lengths that may well be the right ones, or anything.
  const size_t length_bytes = mode & 1 ? 8 : 4;
  size_t total = 0;
  if (mode & 2) {
    parts.push_back(input.take_bytes(input.take<uint8_t>()));
  } else {
    Bytes lengths(features * stride * length_bytes);
    for (size_t at = 0; at < lengths.size(); at += length_bytes) {
      const size_t length = input.take_up_to(3);
      lengths[at] = static_cast<std::byte>(length);
      total += length;
    }
    parts.push_back(std::move(lengths));
  }
  const size_t items = mode & 4 ? input.take<uint8_t>() : total;
  parts.push_back(Bytes(items * (mode & 8 ? 4 : 8), std::byte{1}));
  if (mode & 16) parts.push_back(Bytes(items * 4, std::byte{2}));
  if (mode & 32) parts.resize(input.take_up_to(6));
  return parts;
}

void check(const BatchIds& batch) {
  const ArrivedIds& ids = batch.arrived();
  const auto stride = static_cast<size_t>(ids.total_stride());
  const auto values = static_cast<size_t>(ids.total_values());
  require(
      std::accumulate(ids.counts().begin(), ids.counts().end(), int64_t{0}) == ids.total_values(),
      "the values of the features are not all values");
  for (const auto& [rank, reason] : ids.refusals()) {
    require(ids.strides()[static_cast<size_t>(rank)] == 0, "a refused batch has samples");
    touch({reinterpret_cast<const std::byte*>(reason.data()), reason.size()});
  }
  require(batch.lengths()->bytes == ids.features() * stride * ids.length_bytes(), "lengths");
  require(batch.values()->bytes == values * ids.value_bytes(), "values");
  require(batch.weights()->bytes == values * ids.weight_bytes(), "weights");
  for (const auto* memory : {&batch.lengths(), &batch.values(), &batch.weights()}) {
    touch({(*memory)->data.get(), (*memory)->bytes});
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const size_t features = input.take_up_to(kMostFeatures);
  const int orders[][kWorldSize] = {{0, 1, 2}, {2, 1, 0}, {1, 0, 2}};
  const int(&order)[kWorldSize] = orders[input.take_up_to(2)];
  std::vector<std::vector<Bytes>> parts;
  for (int source = 0; source < kWorldSize; ++source) {
    parts.push_back(take_message(input, features));
  }
  const HostileArrival arrival(std::move(parts));
  accepts([&] { check(BatchIds(*arrival, features, order)); });
  return 0;
}

}  // namespace bls::fuzzing
