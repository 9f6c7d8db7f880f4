#include "messages/ids/ids_message.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "errors.h"

namespace bls {

/// First part of every message: what the receiver needs to read the others.
struct IdsPreamble {
  int64_t stride;
  uint32_t length_bytes;
  uint32_t value_bytes;
  uint32_t weight_bytes;
  uint32_t flags;
  uint64_t updates;
  std::array<uint64_t, 3> wanted_slot_bytes;
};
static_assert(sizeof(IdsPreamble) == 56);

namespace {

enum IdsFlag : uint32_t { kEnded = 1, kRefused = 2 };
constexpr uint32_t kKnownFlags = kEnded | kRefused;

/// A refused batch has the reason in place of weights.
enum IdsPart : size_t { kPreamble, kLengths, kValues, kWeights, kReason = kWeights };

/// Sum of `count` lengths. A negative length makes the result negative, and so does one of 2^32 or
/// more: no bag holds that many ids, and their sum could overflow to an innocent one.
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

int64_t sum_lengths(const std::byte* data, size_t count, size_t item_bytes) {
  return item_bytes == 4 ? sum_lengths<int32_t>(data, count) : sum_lengths<int64_t>(data, count);
}

[[noreturn]] void bad_message(int source, const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol,
                     "ids from rank " + std::to_string(source) + " do not fit: " + what +
                         ". All ranks must shard the same module by the same plan and feed ids "
                         "of the same dtypes");
}

template <class Id>
std::optional<BadId> find_bad_id_of(const JaggedIds& ids, std::span<const int64_t> rows,
                                    std::span<const int64_t> counts) {
  const auto* values = reinterpret_cast<const Id*>(ids.values);
  for (size_t feature = 0; feature < ids.features; ++feature) {
    const int64_t count = counts[feature];
    // Unsigned, so that one comparison finds negative ids too; no early exit, so that it
    // vectorises.
    const auto limit = static_cast<uint64_t>(rows[feature]);
    bool bad = false;
    for (int64_t i = 0; i < count; ++i) {
      bad |= static_cast<uint64_t>(static_cast<int64_t>(values[i])) >= limit;
    }
    if (bad) {
      int64_t at = 0;
      while (static_cast<uint64_t>(static_cast<int64_t>(values[at])) < limit) ++at;
      return BadId{feature, at, static_cast<int64_t>(values[at])};
    }
    values += count;
  }
  return std::nullopt;
}

}  // namespace

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
  std::vector<size_t> in_order(order.begin(), order.end());
  if (in_order.empty()) {
    in_order.resize(ids.features);
    std::iota(in_order.begin(), in_order.end(), size_t{0});
  }
  const size_t world = features_per_rank.size();
  size_t wanted = 0;
  for (const size_t features : features_per_rank) wanted += features;
  if (wanted != in_order.size()) {
    throw std::invalid_argument(std::to_string(in_order.size()) + " features for ranks that get " +
                                std::to_string(wanted));
  }
  // Two blocks, as messages to oneself are read in place where a part is one block.
  const IdsPreamble preamble{static_cast<int64_t>(ids.stride),
                             static_cast<uint32_t>(ids.length_bytes),
                             static_cast<uint32_t>(ids.value_bytes),
                             static_cast<uint32_t>(ids.weight_bytes),
                             (note.ended ? kEnded : 0u) | (note.refusal ? kRefused : 0u),
                             note.updates,
                             note.wanted_slot_bytes};
  const auto* head = reinterpret_cast<const std::byte*>(&preamble);
  const Block preamble_blocks[2] = {{head, 8}, {head + 8, sizeof(preamble) - 8}};

  Block reason;
  if (note.refusal) {
    reason = {reinterpret_cast<const std::byte*>(note.refusal->data()), note.refusal->size()};
  }
  const size_t parts_per_rank = ids.weight_bytes != 0 || note.refusal ? 4 : 3;
  std::vector<Block> lengths;
  std::vector<Block> values;
  std::vector<Block> weights;
  // Spans point into these.
  lengths.reserve(in_order.size());
  values.reserve(in_order.size());
  weights.reserve(in_order.size());
  std::vector<Part> parts(world * 4);
  std::vector<Message> messages(world);
  std::vector<int64_t> sent(world);
  size_t next = 0;
  for (size_t rank = 0; rank < world; ++rank) {
    const size_t first_block = lengths.size();
    const size_t end = next + features_per_rank[rank];
    while (next < end) {
      // Features that follow one another in memory travel as one block.
      const size_t first = in_order[next];
      size_t past = first;
      while (next < end && in_order[next] == past && past < ids.features) {
        ++past;
        ++next;
      }
      if (past == first) {
        throw std::invalid_argument("feature " + std::to_string(first) + " of " +
                                    std::to_string(ids.features));
      }
      const size_t count = first_value[past] - first_value[first];
      const size_t length_row = ids.stride * ids.length_bytes;
      lengths.push_back({ids.lengths + first * length_row, (past - first) * length_row});
      values.push_back(
          {ids.values + first_value[first] * ids.value_bytes, count * ids.value_bytes});
      weights.push_back(
          {ids.weights + first_value[first] * ids.weight_bytes, count * ids.weight_bytes});
      sent[rank] += static_cast<int64_t>(count);
    }
    const size_t blocks = lengths.size() - first_block;
    Part* const part = parts.data() + rank * 4;
    part[kPreamble] = preamble_blocks;
    part[kLengths] = {lengths.data() + first_block, blocks};
    part[kValues] = {values.data() + first_block, blocks};
    part[kWeights] = {weights.data() + first_block, blocks};
    if (note.refusal) part[kReason] = {&reason, 1};
    messages[rank] = {part, parts_per_rank};
  }
  channel.post(messages);
  return sent;
}

ArrivedIds::ArrivedIds(const Arrival& arrival, size_t features, std::span<const int> order)
    : arrival_(arrival), features_(features), order_(order.begin(), order.end()) {
  const size_t world = order_.size();
  strides_.resize(world);
  values_per_source_.resize(world);
  counts_.resize(features * world);
  int sized_by = 0;
  for (size_t place = 0; place < world; ++place) {
    const int source = order_[place];
    const auto parts = arrival.parts(source);
    IdsPreamble preamble;
    if (parts.size() < 3 || parts.size() > 4 || parts[kPreamble].bytes != sizeof(preamble)) {
      bad_message(source, std::to_string(parts.size()) + " parts");
    }
    std::memcpy(&preamble, parts[kPreamble].data, sizeof(preamble));
    read_note(source, preamble, parts);
    if (preamble.stride == 0) {
      // Nothing whose size could differ: a rank without a batch need not know of what it is.
      if (parts[kLengths].bytes != 0 || parts[kValues].bytes != 0) {
        bad_message(source, std::to_string(parts[kLengths].bytes) + " bytes of lengths and " +
                                std::to_string(parts[kValues].bytes) + " of ids without samples");
      }
      continue;
    }
    if (length_bytes_ == 0) {
      sized_by = source;
      length_bytes_ = preamble.length_bytes;
      value_bytes_ = preamble.value_bytes;
      weight_bytes_ = preamble.weight_bytes;
    }
    if (preamble.length_bytes != length_bytes_ || preamble.value_bytes != value_bytes_ ||
        preamble.weight_bytes != weight_bytes_ || (length_bytes_ != 4 && length_bytes_ != 8) ||
        (value_bytes_ != 4 && value_bytes_ != 8) || weight_bytes_ > 8) {
      bad_message(source, "items of " + std::to_string(preamble.length_bytes) + " (lengths), " +
                              std::to_string(preamble.value_bytes) + " (ids) and " +
                              std::to_string(preamble.weight_bytes) + " (weights) bytes, rank " +
                              std::to_string(sized_by) + " sent " + std::to_string(length_bytes_) +
                              ", " + std::to_string(value_bytes_) + " and " +
                              std::to_string(weight_bytes_));
    }
    // By division: a product with the peer's batch size could overflow, and so could a sum of batch
    // sizes beyond all memory, which nothing else refutes where there is no feature.
    const uint64_t bag_bytes = features * length_bytes_;
    if (static_cast<uint64_t>(preamble.stride) > kMaxMessageBytes ||
        (features == 0
             ? parts[kLengths].bytes != 0
             : parts[kLengths].bytes % bag_bytes != 0 ||
                   parts[kLengths].bytes / bag_bytes != static_cast<uint64_t>(preamble.stride))) {
      bad_message(source, std::to_string(parts[kLengths].bytes) + " bytes of lengths for " +
                              std::to_string(features) + " features of batch size " +
                              std::to_string(preamble.stride));
    }
    const auto stride = static_cast<size_t>(preamble.stride);
    int64_t total = 0;
    for (size_t feature = 0; feature < features; ++feature) {
      const int64_t count = sum_lengths(parts[kLengths].data + feature * stride * length_bytes_,
                                        stride, length_bytes_);
      if (count < 0) bad_message(source, "a length is negative or beyond 32 bits");
      counts_[feature * world + place] = count;
      total += count;
    }
    if (parts[kValues].bytes != static_cast<uint64_t>(total) * value_bytes_) {
      bad_message(source, std::to_string(parts[kValues].bytes) + " bytes for " +
                              std::to_string(total) + " ids");
    }
    if (weight_bytes_ != 0 &&
        (parts.size() != 4 ||
         parts[kWeights].bytes != static_cast<uint64_t>(total) * weight_bytes_)) {
      bad_message(source, "weights and ids differ in number");
    }
    strides_[source] = preamble.stride;
    values_per_source_[source] = total;
    total_stride_ += preamble.stride;
    total_values_ += total;
  }
}

void ArrivedIds::read_note(int source, const IdsPreamble& preamble, std::span<const View> parts) {
  if ((preamble.flags & ~kKnownFlags) != 0) {
    bad_message(source, "unknown flags " + std::to_string(preamble.flags));
  }
  all_ended_ = all_ended_ && (preamble.flags & kEnded) != 0;
  updates_ = std::min(updates_, preamble.updates);
  for (size_t i = 0; i < wanted_slot_bytes_.size(); ++i) {
    wanted_slot_bytes_[i] = std::max(wanted_slot_bytes_[i], preamble.wanted_slot_bytes[i]);
  }
  if ((preamble.flags & kRefused) == 0) return;
  if (preamble.stride != 0 || parts.size() != 4) {
    bad_message(source, "a refused batch of " + std::to_string(preamble.stride) + " samples in " +
                            std::to_string(parts.size()) + " parts");
  }
  const View& reason = parts[kReason];
  refusals_.emplace_back(source,
                         std::string(reinterpret_cast<const char*>(reason.data), reason.bytes));
}

void ArrivedIds::assemble(std::byte* lengths, std::byte* values, std::byte* weights) const {
  const size_t world = order_.size();
  std::vector<size_t> read(world, 0);  // values taken from each source so far
  for (size_t feature = 0; feature < features_; ++feature) {
    for (size_t place = 0; place < world; ++place) {
      const int source = order_[place];
      const auto parts = arrival_.parts(source);
      const size_t stride_bytes = static_cast<size_t>(strides_[source]) * length_bytes_;
      const auto count = static_cast<size_t>(counts_[feature * world + place]);
      if (stride_bytes != 0) {
        std::memcpy(lengths, parts[kLengths].data + feature * stride_bytes, stride_bytes);
      }
      // The sender can still write into the message: what was checked is not what is read here.
      if (sum_lengths(lengths, static_cast<size_t>(strides_[source]), length_bytes_) !=
          counts_[feature * world + place]) {
        bad_message(source, "its lengths changed while they were read");
      }
      lengths += stride_bytes;
      if (count == 0) continue;
      std::memcpy(values, parts[kValues].data + read[place] * value_bytes_, count * value_bytes_);
      values += count * value_bytes_;
      if (weight_bytes_ != 0) {
        std::memcpy(weights, parts[kWeights].data + read[place] * weight_bytes_,
                    count * weight_bytes_);
        weights += count * weight_bytes_;
      }
      read[place] += count;
    }
  }
}

std::optional<BadId> find_bad_id(const JaggedIds& ids, std::span<const int64_t> rows,
                                 std::span<const int64_t> counts) {
  return ids.value_bytes == 4 ? find_bad_id_of<int32_t>(ids, rows, counts)
                              : find_bad_id_of<int64_t>(ids, rows, counts);
}

}  // namespace bls
