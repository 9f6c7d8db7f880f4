#include <algorithm>
#include <bit>
#include <cstring>

#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/refuse.h"
#include "codecs/bounded/symbols/bits.h"
#include "codecs/bounded/symbols/standard_codes.h"
#include "codecs/bounded/symbols/symbols.h"

namespace bls::bounded {
namespace {

int read_byte(const std::byte*& in, const std::byte* end) {
  if (in == end) refuse("end within the description of a code");
  return static_cast<int>(*in++);
}

/// The place of the symbol in the next byte.
int read_place(const std::byte*& in, const std::byte* end) {
  return static_cast<int8_t>(read_byte(in, end)) + place_of(0);
}

CodeLengths read_lengths(const std::byte*& in, const std::byte* end) {
  const int first = read_place(in, end), last = read_place(in, end);
  if (first > last) refuse("have a code whose last symbol comes before its first");
  CodeLengths code;
  BitReader reader(in, end);
  int length = kLongestCode;
  for (int place = first; place <= last; ++place) {
    const int number = std::countl_zero(reader.peek());
    reader.skip(number + 1);
    length += number % 2 == 0 ? number / 2 : -(number + 1) / 2;
    if (length < 1 || length > kAbsent) refuse("have a code of impossible length");
    if (length != kAbsent) code.set(place, length);
  }
  if (code.first != first || code.last != last) refuse("describe more symbols than have a code");
  in = reader.finish();
  if (in == nullptr) refuse("end within the lengths of a code, or with bits that must be 0");
  return code;
}

size_t read_size(const std::byte*& in, const std::byte* end) {
  size_t size = 0;
  for (int shift = 0; shift < 63; shift += 7) {
    const auto byte = static_cast<size_t>(read_byte(in, end));
    size |= (byte & 0x7f) << shift;
    if (byte >= 0x80) continue;
    if (byte == 0 && shift > 0) break;
    return size;
  }
  refuse("have the size of a stream in more bytes than it needs");
}

void fill(DecodingTable& table, const CodeLengths& code) {
  struct Code {
    uint8_t length;
    uint8_t symbol;
  };
  Code codes[kSymbols];
  size_t count = 0;
  for_each_code(code, [&](int place, int length, uint32_t) {
    const auto symbol = static_cast<uint8_t>(place - place_of(0));
    codes[count++] = {static_cast<uint8_t>(length), symbol};
    table.lengths[symbol] = static_cast<uint8_t>(length);
  });
  const int longest = codes[count - 1].length;  // and last
  table.shift = 64 - longest;
  DecodingEntry* at = table.entries;
  for (size_t i = 0; i < count; ++i) {
    const Code first = codes[i];
    const int left = longest - first.length;
    DecodingEntry* const end = at + (1 << left);
    // Those that fit come first, as codes are ordered by length.
    for (size_t j = 0; j < count && codes[j].length <= left; ++j) {
      const Code second = codes[j];
      const auto bits = static_cast<uint8_t>(first.length + second.length);
      const DecodingEntry entry{bits, 2, {first.symbol, second.symbol}};
      at = std::fill_n(at, 1 << (left - second.length), entry);
    }
    at = std::fill_n(at, end - at, DecodingEntry{first.length, 1, {first.symbol, 0}});
  }
}

const std::byte* read_streams(const CodeLengths& code, const std::byte* in, const std::byte* end,
                              int8_t* symbols, size_t count) {
  Streams streams;
  streams.count = count < kFourStreams ? 1 : 4;
  size_t sizes[4];
  for (size_t i = 0; i + 1 < streams.count; ++i) sizes[i] = read_size(in, end);
  for (size_t i = 0; i < streams.count; ++i) {
    streams.begin[i] = in;
    if (i + 1 == streams.count) break;
    if (sizes[i] > static_cast<size_t>(end - in)) refuse("end within a stream of codes");
    in += sizes[i];
  }
  DecodingTable table;
  fill(table, code);
  const std::byte* const done = kernels().read_streams(table, streams, end, symbols, count);
  if (done == nullptr) refuse("have a stream of codes that is too short or too long");
  return done;
}

}  // namespace

const std::byte* read_symbols(const std::byte* in, const std::byte* end, int8_t* symbols,
                              size_t count) {
  if (count == 0) return in;
  const int kind = read_byte(in, end);
  if (kind >= kStandard) {
    if (kind >= kStandard + kStandardCodes) refuse("have a code of an unknown kind");
    return read_streams(standard_code(kind - kStandard), in, end, symbols, count);
  }
  if (kind == kLengthsFollow) {
    const CodeLengths code = read_lengths(in, end);
    if (!is_complete(code)) refuse("have a code that is not complete");
    return read_streams(code, in, end, symbols, count);
  }
  const int width = kind - kFixedWidth;
  if (width > 8) refuse("have a code of an unknown kind");
  const int first = read_place(in, end);
  if (first + (1 << width) > kSymbols) refuse("have a code of more symbols than there are");
  if (width == 0) {
    std::memset(symbols, first - place_of(0), count);
    return in;
  }
  return read_streams(fixed_width_code(first, width), in, end, symbols, count);
}

}  // namespace bls::bounded
