#include <algorithm>
#include <bit>
#include <cstring>

#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/symbols/bits.h"
#include "codecs/bounded/symbols/fixed_width.h"
#include "codecs/bounded/symbols/standard_codes.h"
#include "codecs/bounded/symbols/symbols.h"

namespace bls::bounded {
namespace {

// Longer runs have room for a description of their own code, which is better.
constexpr size_t kMostOfStandard = 8192;

/// The places of the first and the last symbol that occur.
struct Range {
  int first = 0;
  int last = kSymbols - 1;

  Range() = default;
  Range(const int8_t* symbols, size_t count) {
    int8_t least = 127, greatest = -128;
    for (size_t i = 0; i < count; ++i) {
      least = std::min(least, symbols[i]);
      greatest = std::max(greatest, symbols[i]);
    }
    first = place_of(least);
    last = place_of(greatest);
  }
};

/// And how often each symbol occurs.
struct Histogram : Range {
  Counts counts;

  Histogram(const int8_t* symbols, size_t count) {
    kernels().count_symbols(symbols, count, counts.data());
    while (counts[static_cast<size_t>(first)] == 0) ++first;
    while (counts[static_cast<size_t>(last)] == 0) --last;
  }
  /// Whether there are as many symbols as some bits tell apart, none of which is more frequent than
  /// two others together. Huffman's algorithm pairs such symbols, then these pairs, and so on: its
  /// code has a fixed width.
  bool is_flat() const {
    if (!std::has_single_bit(static_cast<unsigned>(last - first + 1))) return false;
    uint32_t least = UINT32_MAX, second = UINT32_MAX, greatest = 0;
    for (int place = first; place <= last; ++place) {
      const uint32_t count = counts[static_cast<size_t>(place)];
      greatest = std::max(greatest, count);
      second = std::min(second, std::max(least, count));
      least = std::min(least, count);
    }
    return least > 0 && greatest <= uint64_t{least} + second;
  }
  uint64_t bits_by(const CodeLengths& code) const {
    uint64_t bits = 0;
    for (int place = first; place <= last; ++place) {
      bits += uint64_t{counts[static_cast<size_t>(place)]} * code.of[static_cast<size_t>(place)];
    }
    return bits;
  }
};

/// The counts as short numbers, for which all processors multiply and add several at once.
struct ShortCounts {
  std::array<int16_t, kSymbols> counts;
  size_t first, last;  // of places in blocks

  explicit ShortCounts(const Histogram& histogram) {
    first = static_cast<size_t>(histogram.first) / kBlock * kBlock;
    last = static_cast<size_t>(histogram.last) / kBlock * kBlock + kBlock;
    for (size_t place = first; place < last; ++place) {
      counts[place] = static_cast<int16_t>(histogram.counts[place]);
    }
  }
  uint64_t bits_by(const StandardLengths& lengths) const {
    int32_t bits = 0;
    for (size_t place = first; place < last; ++place) bits += counts[place] * lengths[place];
    return static_cast<uint64_t>(bits);
  }

 private:
  static constexpr size_t kBlock = 16;
  static_assert(kMostOfStandard * kLongestCode <= INT32_MAX && kMostOfStandard <= INT16_MAX);
};

/// A code, and how it is described.
struct Choice {
  CodeLengths code;
  int kind;
  uint64_t bits;  // of the description and all symbols

  void offer(const CodeLengths& other, int other_kind, uint64_t other_bits) {
    if (other_bits >= bits) return;
    *this = {other, other_kind, other_bits};
  }
};

/// Calls `use(number)` with each change of length from symbol to symbol: 0, -1, 1, -2, 2, ... as 0,
/// 1, 2, 3, 4, ...
template <typename Use>
void for_each_change(const CodeLengths& code, Use use) {
  int before = kLongestCode;
  for (int place = code.first; place <= code.last; ++place) {
    const int length = code.of[static_cast<size_t>(place)];
    const int change = (length == 0 ? kAbsent : length) - before;
    use(change < 0 ? -2 * change - 1 : 2 * change);
    before += change;
  }
}

uint64_t description_bits(const CodeLengths& code) {
  uint64_t bits = 0;
  for_each_change(code, [&](int number) { bits += static_cast<uint64_t>(number) + 1; });
  return 24 + 8 * bytes_of_bits(bits);
}

Choice plain_choice(const Range& range, size_t count) {
  const int width = std::bit_width(static_cast<unsigned>(range.last - range.first));
  const int base = std::min(range.first, kSymbols - (1 << width));
  return {fixed_width_code(base, width), kFixedWidth + width,
          16 + count * static_cast<uint64_t>(width)};
}

Choice choose(const Histogram& histogram, size_t count) {
  Choice choice = plain_choice(histogram, count);
  if (choice.kind == kFixedWidth) return choice;  // of no bits
  if (!histogram.is_flat()) {
    const CodeLengths own = good_code(histogram.counts);
    choice.offer(own, kLengthsFollow, description_bits(own) + histogram.bits_by(own));
  }
  if (count > kMostOfStandard) return choice;
  const ShortCounts counts(histogram);
  for (int number = 0; number < kStandardCodes; ++number) {
    const StandardCode& code = standard_code(number);
    if (histogram.first < code.lengths.first || histogram.last > code.lengths.last) continue;
    choice.offer(code.lengths, kStandard + number, 8 + counts.bits_by(code.short_lengths));
  }
  return choice;
}

std::byte* describe(const Choice& choice, std::byte* out) {
  *out++ = static_cast<std::byte>(choice.kind);
  if (choice.kind >= kStandard) return out;
  *out++ = static_cast<std::byte>(choice.code.first - place_of(0));
  if (choice.kind != kLengthsFollow) return out;
  *out++ = static_cast<std::byte>(choice.code.last - place_of(0));
  BitWriter writer(out);
  for_each_change(choice.code, [&](int number) { writer.put(1, number + 1); });
  return writer.finish();
}

/// Seven bits a byte, the low ones first; the highest bit says that there are more.
std::byte* write_number(size_t number, std::byte* out) {
  for (; number >= 0x80; number >>= 7) *out++ = static_cast<std::byte>(number | 0x80);
  *out++ = static_cast<std::byte>(number);
  return out;
}

size_t bytes_of_number(size_t number) {
  size_t bytes = 1;
  while (number >>= 7) ++bytes;
  return bytes;
}

/// How a size differs from the one before: 0, -1, 1, -2, 2, ... as 0, 1, 2, 3, 4, ...
size_t change_of_size(size_t before, size_t size) {
  return size < before ? 2 * (before - size) - 1 : 2 * (size - before);
}

/// `write(symbols, count, out)` writes one stream and returns its end. All have about `bits`.
template <typename Write>
std::byte* write_streams(const int8_t* symbols, size_t count, uint64_t bits, std::byte* out,
                         Write write) {
  const size_t last = streams_of(count) - 1, each = (count + last) / (last + 1);
  if (last == 0) return write(symbols, count, out);
  // Before the streams stand the sizes of all but the last, which hardly ever take more or less
  // room: streams of one table are about as long, so that a change takes a byte.
  std::byte* const streams = out + bytes_of_number(2 * (bits / (last + 1) / 8)) + (last - 1);
  std::byte* end = streams;
  size_t changes[kMostStreams], size = 0, room = 0;
  for (size_t stream = 0; stream <= last; ++stream) {
    const size_t from = stream * each, before = size;
    std::byte* const begin = end;
    end = write(symbols + from, std::min(each, count - from), begin);
    size = static_cast<size_t>(end - begin);
    changes[stream] = change_of_size(before, size);
    room += stream < last ? bytes_of_number(changes[stream]) : 0;
  }
  const auto all = static_cast<size_t>(end - streams);
  if (out + room != streams) std::memmove(out + room, streams, all);
  for (size_t stream = 0; stream < last; ++stream) out = write_number(changes[stream], out);
  return out + all;
}

}  // namespace

std::byte* write_symbols(const int8_t* symbols, size_t count, bool fixed_width, std::byte* out) {
  if (count == 0) return out;
  const Choice choice = fixed_width ? plain_choice(Range(symbols, count), count)
                                    : choose(Histogram(symbols, count), count);
  out = describe(choice, out);
  if (choice.kind == kFixedWidth) return out;  // of no bits
  if (choice.kind < kLengthsFollow) {
    const FixedWidth code{choice.kind - kFixedWidth, choice.code.first};
    return write_streams(symbols, count, choice.bits, out,
                         [&](const int8_t* from, size_t size, std::byte* to) {
                           return write_fixed_width(code, from, size, to);
                         });
  }
  CodeTable table;
  for_each_code(choice.code, [&](int place, int length, uint32_t code) {
    const auto symbol = static_cast<uint8_t>(place - place_of(0));
    table.codes[symbol] = uint64_t{code} << (64 - length);
    table.lengths[symbol] = static_cast<uint8_t>(length);
  });
  return write_streams(symbols, count, choice.bits, out,
                       [&](const int8_t* from, size_t size, std::byte* to) {
                         return kernels().write_stream(table, from, size, to);
                       });
}

}  // namespace bls::bounded
