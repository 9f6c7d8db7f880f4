#include "messages/ids/arrived_ids.h"

#include <algorithm>
#include <cstring>

#include "channel/message_layout.h"
#include "errors.h"
#include "messages/ids/ids_preamble.h"
#include "messages/ids/jagged_ids.h"

namespace bls {
namespace {

[[noreturn]] void bad_message(const RankNames& names, int source, const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol,
                     "ids from " + names.of(source) + " do not fit: " + what +
                         ". All ranks must shard the same module by the same plan and feed ids "
                         "of the same dtypes");
}

IdsPreamble preamble_of(const RankNames& names, int source, std::span<const View> parts) {
  IdsPreamble preamble;
  if (parts.size() < 3 || parts.size() > 4 || parts[kPreamble].bytes != sizeof(preamble)) {
    bad_message(names, source, std::to_string(parts.size()) + " parts");
  }
  std::memcpy(&preamble, parts[kPreamble].data, sizeof(preamble));
  return preamble;
}

/// `bytes` of lengths have to be those of all features and samples.
void check_lengths(const RankNames& names, int source, uint64_t bytes, size_t features,
                   size_t length_bytes, int64_t stride) {
  // By division: a product with the peer's batch size could overflow, and so could a sum of batch
  // sizes beyond all memory, which nothing else refutes where there is no feature.
  const uint64_t bag_bytes = features * length_bytes;
  if (static_cast<uint64_t>(stride) > kMaxMessageBytes ||
      (features == 0
           ? bytes != 0
           : bytes % bag_bytes != 0 || bytes / bag_bytes != static_cast<uint64_t>(stride))) {
    bad_message(names, source,
                std::to_string(bytes) + " bytes of lengths for " + std::to_string(features) +
                    " features of batch size " + std::to_string(stride));
  }
}

/// Copies ids and returns the largest, looked at while they are in the nearest cache.
int64_t copy_ids(std::byte* to, const std::byte* from, size_t count, size_t id_bytes) {
  constexpr size_t kIdsAtOnce = 1024;
  int64_t largest = 0;
  for (size_t first = 0; first < count; first += kIdsAtOnce) {
    const size_t ids = std::min(kIdsAtOnce, count - first);
    std::byte* const copied = to + first * id_bytes;
    std::memcpy(copied, from + first * id_bytes, ids * id_bytes);
    largest = std::max(largest, largest_id(copied, ids, id_bytes));
  }
  return largest;
}

}  // namespace

ArrivedIds::ArrivedIds(const Arrival& arrival, size_t features, std::span<const int> order)
    : names_(&arrival.names()), features_(features), order_(order.begin(), order.end()) {
  const size_t world = order_.size();
  strides_.resize(world);
  values_per_source_.resize(world);
  counts_.resize(features * world);
  for (size_t place = 0; place < world; ++place) {
    const int source = order_[place];
    const auto parts = arrival.parts(source);
    const IdsPreamble preamble = preamble_of(*names_, source, parts);
    read_note(source, preamble, parts);
    if (preamble.stride == 0) {
      // Nothing whose size could differ: a rank without a batch need not know of what it is.
      if (parts[kLengths].bytes != 0 || parts[kValues].bytes != 0) {
        bad_message(*names_, source,
                    std::to_string(parts[kLengths].bytes) + " bytes of lengths and " +
                        std::to_string(parts[kValues].bytes) + " of ids without samples");
      }
      continue;
    }
    check_items(source, preamble);
    check_lengths(*names_, source, parts[kLengths].bytes, features, length_bytes_, preamble.stride);
    count_values(place, preamble, parts);
  }
}

void ArrivedIds::check_items(int source, const IdsPreamble& preamble) {
  if (length_bytes_ == 0) {
    sized_by_ = source;
    length_bytes_ = preamble.length_bytes;
    value_bytes_ = preamble.value_bytes;
    weight_bytes_ = preamble.weight_bytes;
  }
  if (preamble.length_bytes == length_bytes_ && preamble.value_bytes == value_bytes_ &&
      preamble.weight_bytes == weight_bytes_ && (length_bytes_ == 4 || length_bytes_ == 8) &&
      (value_bytes_ == 4 || value_bytes_ == 8) && weight_bytes_ <= 8) {
    return;
  }
  if ((preamble.weight_bytes == 0) != (weight_bytes_ == 0)) {
    const bool has = preamble.weight_bytes != 0;
    throw ChannelError(ErrorKind::kProtocol,
                       "ids from " + names_->of(source) + " do not fit: they have " +
                           (has ? "" : "no ") + "weights, but those from " + names_->of(sized_by_) +
                           (has ? " have none" : " have some") +
                           ". Give the KeyedJaggedTensors of all ranks weights, or of none");
  }
  bad_message(*names_, source,
              "items of " + std::to_string(preamble.length_bytes) + " (lengths), " +
                  std::to_string(preamble.value_bytes) + " (ids) and " +
                  std::to_string(preamble.weight_bytes) + " (weights) bytes, " +
                  names_->of(sized_by_) + " sent " + std::to_string(length_bytes_) + ", " +
                  std::to_string(value_bytes_) + " and " + std::to_string(weight_bytes_));
}

void ArrivedIds::count_values(size_t place, const IdsPreamble& preamble,
                              std::span<const View> parts) {
  const int source = order_[place];
  const auto stride = static_cast<size_t>(preamble.stride);
  int64_t total = 0;
  for (size_t feature = 0; feature < features_; ++feature) {
    const int64_t count =
        sum_lengths(parts[kLengths].data + feature * stride * length_bytes_, stride, length_bytes_);
    if (count < 0) bad_message(*names_, source, "a length is negative or beyond 32 bits");
    counts_[feature * order_.size() + place] = count;
    total += count;
  }
  if (parts[kValues].bytes != static_cast<uint64_t>(total) * value_bytes_) {
    bad_message(
        *names_, source,
        std::to_string(parts[kValues].bytes) + " bytes for " + std::to_string(total) + " ids");
  }
  if (weight_bytes_ != 0 &&
      (parts.size() != 4 ||
       parts[kWeights].bytes != static_cast<uint64_t>(total) * weight_bytes_)) {
    bad_message(*names_, source, "weights and ids differ in number");
  }
  strides_[source] = preamble.stride;
  values_per_source_[source] = total;
  total_stride_ += preamble.stride;
  total_values_ += total;
}

void ArrivedIds::read_note(int source, const IdsPreamble& preamble, std::span<const View> parts) {
  if ((preamble.flags & ~kKnownFlags) != 0) {
    bad_message(*names_, source, "unknown flags " + std::to_string(preamble.flags));
  }
  all_ended_ = all_ended_ && (preamble.flags & kEnded) != 0;
  updates_ = std::min(updates_, preamble.updates);
  for (size_t i = 0; i < wanted_slot_bytes_.size(); ++i) {
    wanted_slot_bytes_[i] = std::max(wanted_slot_bytes_[i], preamble.wanted_slot_bytes[i]);
  }
  if ((preamble.flags & kRefused) == 0) return;
  if (preamble.stride != 0 || parts.size() != 4) {
    bad_message(*names_, source,
                "a refused batch of " + std::to_string(preamble.stride) + " samples in " +
                    std::to_string(parts.size()) + " parts");
  }
  const View& reason = parts[kReason];
  refusals_.emplace_back(source,
                         std::string(reinterpret_cast<const char*>(reason.data), reason.bytes));
}

std::vector<int64_t> ArrivedIds::values_per_feature() const {
  std::vector<int64_t> values(features_, 0);
  for (size_t i = 0; i < counts_.size(); ++i) values[i / order_.size()] += counts_[i];
  return values;
}

std::vector<int64_t> ArrivedIds::assemble(const Arrival& arrival, std::byte* lengths,
                                          std::byte* values, std::byte* weights) const {
  const size_t world = order_.size();
  std::vector<int64_t> largest(features_, 0);
  std::vector<size_t> read(world, 0);  // values taken from each source so far
  for (size_t feature = 0; feature < features_; ++feature) {
    for (size_t place = 0; place < world; ++place) {
      const int source = order_[place];
      const auto parts = arrival.parts(source);
      const size_t stride_bytes = static_cast<size_t>(strides_[source]) * length_bytes_;
      const auto count = static_cast<size_t>(counts_[feature * world + place]);
      if (stride_bytes != 0) {
        std::memcpy(lengths, parts[kLengths].data + feature * stride_bytes, stride_bytes);
      }
      // The sender can still write into the message: what was checked is not what is read here.
      if (sum_lengths(lengths, static_cast<size_t>(strides_[source]), length_bytes_) !=
          counts_[feature * world + place]) {
        bad_message(arrival.names(), source, "its lengths changed while they were read");
      }
      lengths += stride_bytes;
      if (count == 0) continue;
      largest[feature] = std::max(
          largest[feature],
          copy_ids(values, parts[kValues].data + read[place] * value_bytes_, count, value_bytes_));
      values += count * value_bytes_;
      if (weight_bytes_ != 0) {
        std::memcpy(weights, parts[kWeights].data + read[place] * weight_bytes_,
                    count * weight_bytes_);
        weights += count * weight_bytes_;
      }
      read[place] += count;
    }
  }
  return largest;
}

}  // namespace bls
