#include "messages/reduce_scatter.h"

#include <algorithm>
#include <cstddef>

#include "messages/all_to_all.h"

namespace bls {
namespace {

// gloo's largest segment, and how many each rank has at least.
constexpr size_t kLargestSegmentBytes = 1 << 20;
constexpr size_t kFewestSegments = 2;
// Floats summed before the next ones are begun: small enough for the nearest cache.
constexpr size_t kBlock = 2048;

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/// Floats of gloo's ring that start at one rank, of `count` in all.
size_t chunk_floats(size_t count, size_t world) {
  const size_t bytes = count * sizeof(float);
  const size_t per_rank =
      std::max(divide_up(divide_up(bytes, kLargestSegmentBytes), world), kFewestSegments);
  const size_t segment_bytes = divide_up(bytes, per_rank * world);
  return per_rank * divide_up(segment_bytes, sizeof(float));
}

const float* floats_of(const Arrival& arrival, size_t source) {
  return reinterpret_cast<const float*>(arrival.part(static_cast<int>(source), 0).data);
}

/// Sums the floats [begin, end) of all messages in the order of chunk `chunk`.
void sum(const Arrival& arrival, size_t chunk, size_t begin, size_t end, float* output) {
  const size_t world = static_cast<size_t>(arrival.world_size());
  const auto source = [&](size_t step) { return (chunk + world - step) % world; };
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t stop = std::min(end, at + kBlock);
    const float* first = floats_of(arrival, source(1));
    std::copy(first + at, first + stop, output + at);
    for (size_t step = 2; step <= world; ++step) {
      const float* next = floats_of(arrival, source(step));
      for (size_t i = at; i < stop; ++i) output[i] += next[i];
    }
  }
}

}  // namespace

void collect_sum(const Arrival& arrival, int rank, std::span<float> output) {
  const size_t world = static_cast<size_t>(arrival.world_size());
  for (int source = 0; source < arrival.world_size(); ++source) {
    whole_part(arrival, source, output.size_bytes());
  }
  if (output.empty()) return;
  const size_t chunk = chunk_floats(output.size() * world, world);
  // Chunks are rounded up to whole segments, so that this rank's floats may be of two.
  const size_t before = static_cast<size_t>(rank) * output.size();
  for (size_t begin = 0; begin < output.size();) {
    const size_t number = (before + begin) / chunk;
    const size_t end = std::min(output.size(), (number + 1) * chunk - before);
    sum(arrival, number, begin, end, output.data());
    begin = end;
  }
}

}  // namespace bls
