#include "messages/all_reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "messages/message_builder.h"

namespace bls {
namespace {

// Up to so many bytes every rank sends all it has to every other one: one exchange in place of two.
constexpr size_t kWholeBytes = 16 << 10;
// What the three parts of a message may be moved by to be aligned.
constexpr size_t kAlignment = 64;
constexpr size_t kPadding = 3 * kAlignment;

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }
size_t round_up(size_t a, size_t b) { return divide_up(a, b) * b; }

/// What all ranks have to call alike. It travels in every message.
struct Terms {
  uint64_t count = 0;
  Element element{};
  Reduction reduction{};
  std::array<uint8_t, 6> reserved{};

  std::string text() const {
    return std::to_string(count) + " x " + name_of(element) + " by " + name_of(reduction);
  }
};
static_assert(sizeof(Terms) == 16);

/// Consecutive elements, in bytes.
struct Range {
  size_t begin = 0;
  size_t bytes = 0;
};

/// A tensor, cut into segments, and these into one chunk for each rank.
class Segments {
 public:
  Segments(size_t bytes, size_t world, size_t largest_chunk) : bytes_(bytes), world_(world) {
    count_ = divide_up(bytes, world * largest_chunk);
    if (count_ > 0) chunk_ = round_up(divide_up(bytes, world * count_), kAlignment);
  }
  size_t count() const { return count_; }
  /// Empty behind the last one.
  Range chunk(size_t segment, size_t rank) const {
    const size_t begin = std::min(bytes_, (segment * world_ + rank) * chunk_);
    return {begin, std::min(bytes_, begin + chunk_) - begin};
  }

 private:
  size_t bytes_;
  size_t world_;
  size_t count_ = 0;
  size_t chunk_ = 0;
};

/// One call on one rank.
class AllReduce {
 public:
  AllReduce(Channel& channel, const Terms& terms, std::byte* data)
      : channel_(channel),
        terms_(terms),
        data_(data),
        world_(static_cast<size_t>(channel.config().world_size)),
        rank_(static_cast<size_t>(channel.config().rank)),
        sources_(world_) {}

  void run_whole(size_t bytes) {
    post([&](size_t) { return Range{0, bytes}; }, [](size_t) { return Range{}; });
    const Arrival& arrival = channel_.wait();
    check(
        arrival, [&](size_t) { return bytes; }, [](size_t) { return size_t{0}; });
    reduce_own(arrival, {0, bytes});
    channel_.release();
  }

  /// Message i has the terms of segment i to be summed and the sum of segment i - 2, which stands
  /// between two waits: one segment is summed while the next ones travel.
  void run_segments(const Segments& segments) {
    const size_t messages = segments.count() + kAllReducePosts;
    for (size_t i = 0; i < messages + kAllReducePosts; ++i) {
      if (i >= kAllReducePosts) complete(segments, i - kAllReducePosts);
      if (i >= messages) continue;
      const Range sum = chunk_of(segments, i - kAllReducePosts, rank_);
      post([&](size_t to) { return chunk_of(segments, i, to); }, [&](size_t) { return sum; });
    }
  }

 private:
  /// Empty for segments before the first, whose numbers have wrapped around, and behind the last.
  static Range chunk_of(const Segments& segments, size_t segment, size_t rank) {
    return segment < segments.count() ? segments.chunk(segment, rank) : Range{};
  }

  template <class TermsFor, class SumFor>
  void post(const TermsFor& terms_for, const SumFor& sum_for) {
    MessageBuilder builder(world_, 3 * world_, 3 * world_);
    for (size_t to = 0; to < world_; ++to) {
      builder.add_message();
      if (to == rank_) continue;
      builder.add_part();
      builder.add_block({reinterpret_cast<const std::byte*>(&terms_), sizeof(terms_)});
      for (const Range range : {terms_for(to), sum_for(to)}) {
        builder.add_part();
        builder.add_block({data_ + range.begin, range.bytes});
      }
    }
    channel_.post(builder.messages());
  }

  void complete(const Segments& segments, size_t message) {
    const Arrival& arrival = channel_.wait();
    const Range own = chunk_of(segments, message, rank_);
    const auto sum_of = [&](size_t source) {
      return chunk_of(segments, message - kAllReducePosts, source);
    };
    check(
        arrival, [&](size_t) { return own.bytes; },
        [&](size_t source) { return sum_of(source).bytes; });
    reduce_own(arrival, own);
    for (size_t source = 0; source < world_; ++source) {
      const Range sum = sum_of(source);
      if (source == rank_ || sum.bytes == 0) continue;
      std::memcpy(data_ + sum.begin, part(arrival, source, 2), sum.bytes);
    }
    channel_.release();
  }

  static const std::byte* part(const Arrival& arrival, size_t source, size_t index) {
    return arrival.part(static_cast<int>(source), index).data;
  }

  void reduce_own(const Arrival& arrival, const Range& own) {
    for (size_t source = 0; source < world_; ++source) {
      sources_[source] = source == rank_ ? data_ + own.begin : part(arrival, source, 1);
    }
    reduce(terms_.element, terms_.reduction, sources_, own.bytes / bytes_of(terms_.element),
           data_ + own.begin);
  }

  template <class TermsBytes, class SumBytes>
  void check(const Arrival& arrival, const TermsBytes& terms_bytes, const SumBytes& sum_bytes) {
    for (size_t source = 0; source < world_; ++source) {
      if (source == rank_) continue;
      const auto parts = arrival.parts(static_cast<int>(source));
      if (parts.size() != 3 || parts[0].bytes != sizeof(Terms)) {
        refuse(arrival, source, "sent what is no part of an all-reduce");
      }
      Terms theirs;
      std::memcpy(&theirs, parts[0].data, sizeof(theirs));
      const bool known = static_cast<uint8_t>(theirs.element) < kElements &&
                         static_cast<uint8_t>(theirs.reduction) < kReductions;
      if (!known) refuse(arrival, source, "reduces elements of a type that this rank lacks");
      if (theirs.count != terms_.count || theirs.element != terms_.element ||
          theirs.reduction != terms_.reduction) {
        refuse(arrival, source,
               "reduces " + theirs.text() + ", and this rank " + terms_.text() +
                   ". All ranks have to make the same all-reduces in the same order: compare the "
                   "shapes and dtypes of the two");
      }
      if (parts[1].bytes != terms_bytes(source) || parts[2].bytes != sum_bytes(source)) {
        refuse(arrival, source,
               "is at another place of an all-reduce of " + terms_.text() + " than this rank");
      }
    }
  }

  [[noreturn]] void refuse(const Arrival& arrival, size_t source, const std::string& what) {
    const ChannelConfig& config = channel_.config();
    const std::string text = config.names.of(static_cast<int>(source)) + " " + what;
    channel_.poison(text);
    throw ChannelError(ErrorKind::kProtocol,
                       "channel '" + config.name + "' on " + config.names.of(config.rank) +
                           ", sequence " + std::to_string(arrival.sequence()) + ", lag " +
                           std::to_string(channel_.posted() - 1 - arrival.sequence()) + ": " +
                           text);
  }

  Channel& channel_;
  const Terms terms_;
  std::byte* const data_;
  const size_t world_;
  const size_t rank_;
  std::vector<const std::byte*> sources_;
};

}  // namespace

void all_reduce(Channel& channel, Element element, Reduction reduction, std::byte* data,
                size_t count) {
  const size_t slot_bytes = channel.transport().slot_bytes();
  const bool integers = element == Element::kInt32 || element == Element::kInt64;
  if (reduction == Reduction::kAverage && integers) {
    throw std::invalid_argument(std::string("averages of ") + name_of(element) +
                                " are not whole numbers");
  }
  if (channel.config().bound + 1 < kAllReducePosts) {
    throw std::invalid_argument("channel '" + channel.config().name + "' has a bound of " +
                                std::to_string(channel.config().bound) + ", but needs one of " +
                                std::to_string(kAllReducePosts - 1) + " for an all-reduce");
  }
  // A header and three parts; each has room for two chunks of a cache line at least.
  if (slot_bytes < kMinSlotBytes + sizeof(Terms) + kPadding + 2 * kAlignment) {
    throw std::invalid_argument("slots of " + std::to_string(slot_bytes) +
                                " bytes are too small for an all-reduce");
  }
  const size_t room = slot_bytes - kMinSlotBytes - sizeof(Terms) - kPadding;
  const size_t bytes = count * bytes_of(element);
  AllReduce call(channel, {count, element, reduction}, data);
  if (bytes <= std::min(room, kWholeBytes)) {
    call.run_whole(bytes);
  } else {
    const size_t world = static_cast<size_t>(channel.config().world_size);
    call.run_segments(Segments(bytes, world, room / 2 / kAlignment * kAlignment));
  }
}

}  // namespace bls
