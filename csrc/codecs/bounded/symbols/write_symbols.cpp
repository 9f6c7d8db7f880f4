#include <algorithm>
#include <bit>
#include <cstring>

#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/symbols/bits.h"
#include "codecs/bounded/symbols/standard_codes.h"
#include "codecs/bounded/symbols/symbols.h"

namespace bls::bounded {
namespace {

// Longer runs have room for a description of their own code, which is better.
constexpr size_t kMostOfStandard = 8192;

/// How often each symbol occurs, and which is the first and the last that does.
struct Histogram {
  Counts counts;
  int first = 0;
  int last = kSymbols - 1;

  Histogram(const int8_t* symbols, size_t count) {
    kernels().count_symbols(symbols, count, counts.data());
    while (counts[static_cast<size_t>(first)] == 0) ++first;
    while (counts[static_cast<size_t>(last)] == 0) --last;
  }
  uint64_t bits_by(const CodeLengths& code) const {
    uint64_t bits = 0;
    for (int place = first; place <= last; ++place) {
      bits += uint64_t{counts[static_cast<size_t>(place)]} * code.of[static_cast<size_t>(place)];
    }
    return bits;
  }
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

Choice choose(const Histogram& histogram, size_t count, bool fixed_width) {
  const int width = std::bit_width(static_cast<unsigned>(histogram.last - histogram.first));
  const int base = std::min(histogram.first, kSymbols - (1 << width));
  Choice choice{fixed_width_code(base, width), kFixedWidth + width,
                16 + count * static_cast<uint64_t>(width)};
  if (width == 0 || fixed_width) return choice;
  const CodeLengths best = best_code(histogram.counts);
  choice.offer(best, kLengthsFollow, description_bits(best) + histogram.bits_by(best));
  if (count > kMostOfStandard) return choice;
  for (int number = 0; number < kStandardCodes; ++number) {
    const CodeLengths& code = standard_code(number);
    if (histogram.first < code.first || histogram.last > code.last) continue;
    choice.offer(code, kStandard + number, 8 + histogram.bits_by(code));
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
std::byte* write_size(size_t size, std::byte* out) {
  for (; size >= 0x80; size >>= 7) *out++ = static_cast<std::byte>(size | 0x80);
  *out++ = static_cast<std::byte>(size);
  return out;
}

std::byte* write_streams(const CodeTable& table, const int8_t* symbols, size_t count,
                         std::byte* out) {
  if (count < kFourStreams) return kernels().write_stream(table, symbols, count, out);
  const size_t quarter = (count + 3) / 4;
  // The sizes stand before the streams, and have four bytes each for now.
  constexpr size_t kRoom = 3 * 5;
  std::byte* const streams = out + kRoom;
  std::byte* end = streams;
  for (size_t stream = 0; stream < 4; ++stream) {
    const size_t from = stream * quarter;
    std::byte* const begin = end;
    end = kernels().write_stream(table, symbols + from, std::min(quarter, count - from), begin);
    if (stream < 3) out = write_size(static_cast<size_t>(end - begin), out);
  }
  std::memmove(out, streams, static_cast<size_t>(end - streams));
  return out + (end - streams);
}

}  // namespace

std::byte* write_symbols(const int8_t* symbols, size_t count, bool fixed_width, std::byte* out) {
  if (count == 0) return out;
  const Choice choice = choose(Histogram(symbols, count), count, fixed_width);
  out = describe(choice, out);
  if (choice.kind == kFixedWidth) return out;  // of no bits
  CodeTable table;
  for_each_code(choice.code, [&](int place, int length, uint32_t code) {
    const auto symbol = static_cast<uint8_t>(place - place_of(0));
    table.codes[symbol] = uint64_t{code} << (64 - length);
    table.lengths[symbol] = static_cast<uint8_t>(length);
  });
  return write_streams(table, symbols, count, out);
}

}  // namespace bls::bounded
