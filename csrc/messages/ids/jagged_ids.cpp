#include "messages/ids/jagged_ids.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "host/instruction_set.h"

namespace bls {
namespace {

template <class Length>
int64_t sum_lengths(const std::byte* data, size_t count) {
  const auto* lengths = reinterpret_cast<const Length*>(data);
  uint64_t sum = 0;
  uint64_t bits = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto length = static_cast<uint64_t>(lengths[i]);
    sum += length;
    bits |= length;
  }
  return bits >> 32 != 0 ? -1 : static_cast<int64_t>(sum);
}

/// Whether an id is negative or `limit` at least.
///
/// The sign bit of an id, or of what it lacks to the largest one, says so. Neither a comparison of
/// unsigned numbers, which SSE2 lacks, nor an early exit keeps the compiler from using vectors.
template <class Id>
bool any_outside(const Id* ids, int64_t count, int64_t limit) {
  using Bits = std::make_unsigned_t<Id>;
  const auto last = static_cast<Bits>(std::min<int64_t>(limit - 1, std::numeric_limits<Id>::max()));
  Bits signs = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<Bits>(ids[i]);
    signs |= id | (last - id);
  }
  return static_cast<Id>(signs) < 0;
}

/// Compares the lower 32 bits, for which SSE2 has an instruction.
template <class Id>
[[gnu::always_inline]] inline int64_t largest_of(const Id* ids, size_t count) {
  Id bits = 0;
  int32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto low = static_cast<int32_t>(ids[i]);
    bits |= ids[i];
    largest = largest < low ? low : largest;
  }
  return bits < 0 || bits >> 31 != 0 ? kUnknownId : largest;
}

#ifdef __x86_64__
template <class Id>
[[gnu::target("avx2")]] int64_t largest_of_avx2(const Id* ids, size_t count) {
  return largest_of(ids, count);
}
#endif

template <class Id>
int64_t largest_id_of(const std::byte* data, size_t count) {
  const auto* ids = reinterpret_cast<const Id*>(data);
#ifdef __x86_64__
  if (instruction_set() != InstructionSet::kPortable) return largest_of_avx2(ids, count);
#endif
  return largest_of(ids, count);
}

template <class Id>
std::optional<BadId> find_bad_id_of(const JaggedIds& ids, std::span<const int64_t> rows,
                                    std::span<const int64_t> counts) {
  const auto* values = reinterpret_cast<const Id*>(ids.values);
  for (size_t feature = 0; feature < ids.features; ++feature) {
    const int64_t count = counts[feature];
    if (any_outside(values, count, rows[feature])) {
      const auto limit = static_cast<uint64_t>(rows[feature]);
      int64_t at = 0;
      while (static_cast<uint64_t>(static_cast<int64_t>(values[at])) < limit) ++at;
      return BadId{feature, at, static_cast<int64_t>(values[at])};
    }
    values += count;
  }
  return std::nullopt;
}

}  // namespace

int64_t sum_lengths(const std::byte* data, size_t count, size_t item_bytes) {
  return item_bytes == 4 ? sum_lengths<int32_t>(data, count) : sum_lengths<int64_t>(data, count);
}

int64_t largest_id(const std::byte* ids, size_t count, size_t item_bytes) {
  return item_bytes == 4 ? largest_id_of<int32_t>(ids, count) : largest_id_of<int64_t>(ids, count);
}

std::vector<int64_t> values_per_feature(const JaggedIds& ids) {
  std::vector<int64_t> counts(ids.features);
  int64_t total = 0;
  for (size_t feature = 0; feature < ids.features; ++feature) {
    const std::byte* at = ids.lengths + feature * ids.stride * ids.length_bytes;
    counts[feature] = sum_lengths(at, ids.stride, ids.length_bytes);
    if (counts[feature] < 0) {
      throw std::invalid_argument("feature " + std::to_string(feature) +
                                  " has a length that is negative or beyond 32 bits");
    }
    total += counts[feature];
  }
  if (total != static_cast<int64_t>(ids.count)) {
    throw std::invalid_argument("the lengths add up to " + std::to_string(total) + " ids, but " +
                                std::to_string(ids.count) + " values were given");
  }
  return counts;
}

std::optional<BadId> find_bad_id(const JaggedIds& ids, std::span<const int64_t> rows,
                                 std::span<const int64_t> counts) {
  return ids.value_bytes == 4 ? find_bad_id_of<int32_t>(ids, rows, counts)
                              : find_bad_id_of<int64_t>(ids, rows, counts);
}

}  // namespace bls
