#include <algorithm>
#include <bit>
#include <cstring>

#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/refuse.h"
#include "codecs/bounded/symbols/bits.h"
#include "codecs/bounded/symbols/fixed_width.h"
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

/// How the size of a stream differs from the one before.
size_t read_change(const std::byte*& in, const std::byte* end) {
  size_t change = 0;
  for (int shift = 0; shift < 63; shift += 7) {
    const auto byte = static_cast<size_t>(read_byte(in, end));
    change |= (byte & 0x7f) << shift;
    if (byte >= 0x80) continue;
    if (byte == 0 && shift > 0) break;
    return change;
  }
  refuse("have the size of a stream in more bytes than it needs");
}

/// For so many symbols it pays to make a larger table, which yields three of them at once.
constexpr size_t kWorthThree = 2048;
/// With more bits a symbol hardly two are found at once.
constexpr double kOneByOneBits = 6.5;

/// The codes of a table in their order, that of their bits and lengths.
struct Codes {
  struct Code {
    uint8_t length;
    uint8_t symbol;
  };
  Code of[kSymbols];
  size_t count = 0;

  explicit Codes(const CodeLengths& code) {
    for_each_code(code, [&](int place, int length, uint32_t) {
      of[count++] = {static_cast<uint8_t>(length), static_cast<uint8_t>(place - place_of(0))};
    });
  }
  int longest() const { return of[count - 1].length; }
};

/// Third codes, for each number of bits that may be left for them: what is there where they fit,
/// and 0 elsewhere.
class Thirds {
 public:
  Thirds(const Codes& codes, int most_left) {
    for (int left = 0; left <= most_left; ++left) {
      DecodingEntry* at = entries_ + (1 << left) - 1;
      DecodingEntry* const end = at + (1 << left);
      for (size_t i = 0; i < codes.count && codes.of[i].length <= left; ++i) {
        const auto& [length, symbol] = codes.of[i];
        at = std::fill_n(at, 1 << (left - length), decoding_entry(2, length, symbol));
      }
      std::fill(at, end, 0);
    }
  }
  const DecodingEntry* of(int left) const { return entries_ + (1 << left) - 1; }

 private:
  DecodingEntry entries_[1 << (kLongestCode - 1)];
};

/// Writes an entry for all that so many bits may be, which begin with a code of `length` bits. The
/// symbol of that is still missing.
DecodingEntry* fill_behind(int length, int bits, const Codes& codes, const Thirds* thirds,
                           DecodingEntry* at) {
  DecodingEntry* const end = at + (1 << (bits - length));
  const DecodingEntry first = decoding_entry(0, length, 0);
  // Those that fit come first, as codes are ordered by length.
  for (size_t i = 0; i < codes.count && codes.of[i].length <= bits - length; ++i) {
    const auto& [of_second, symbol] = codes.of[i];
    const int left = bits - length - of_second;
    const DecodingEntry both = first + decoding_entry(1, of_second, symbol);
    if (thirds == nullptr) {
      at = std::fill_n(at, 1 << left, both);
    } else {
      const DecodingEntry* const third = thirds->of(left);
      for (int rest = 0; rest < 1 << left; ++rest) *at++ = both + third[rest];
    }
  }
  std::fill(at, end, first);
  return end;
}

void fill(DecodingTable& table, const Codes& codes, const Thirds* thirds, int bits) {
  table.shift = 64 - bits;
  DecodingEntry* at = table.entries;
  for (size_t i = 0; i < codes.count;) {
    const int length = codes.of[i].length;
    const size_t entries = size_t{1} << (bits - length);
    const DecodingEntry* const behind = at;
    const size_t first = i;
    at = fill_behind(length, bits, codes, thirds, at);
    // The same may follow all codes of this length.
    for (++i; i < codes.count && codes.of[i].length == length; ++i, at += entries) {
      const DecodingEntry symbol = DecodingEntry{codes.of[i].symbol} << kBitsOfSize;
      for (size_t j = 0; j < entries; ++j) at[j] = behind[j] | symbol;
    }
    const DecodingEntry symbol = DecodingEntry{codes.of[first].symbol} << kBitsOfSize;
    for (size_t j = 0; j < entries; ++j) table.entries[behind - table.entries + j] |= symbol;
  }
  for (size_t i = 0; i < codes.count; ++i) table.lengths[codes.of[i].symbol] = codes.of[i].length;
}

/// Fills a table whose entries have one symbol each.
void fill_one_by_one(DecodingTable& table, const Codes& codes) {
  table.shift = 64 - kLongestCode;
  DecodingEntry* at = table.entries;
  for (size_t i = 0; i < codes.count; ++i) {
    const auto& [length, symbol] = codes.of[i];
    at = std::fill_n(at, 1 << (kLongestCode - length), decoding_entry(0, length, symbol));
    table.lengths[symbol] = length;
  }
}

void fill(DecodingTable& table, const CodeLengths& code, size_t symbols, bool one_by_one) {
  const Codes codes(code);
  table.one_by_one = one_by_one;
  if (one_by_one) return fill_one_by_one(table, codes);
  if (symbols < kWorthThree) return fill(table, codes, nullptr, codes.longest());
  const Thirds thirds(codes, kLongestCode - 2);
  fill(table, codes, &thirds, kLongestCode);
}

/// Changes of 0, -1, 1, -2, 2, ... are the numbers 0, 1, 2, 3, 4, ...
size_t changed_size(size_t before, size_t change) {
  if (change % 2 == 0) return before + change / 2;
  if (change / 2 >= before) refuse("have a stream of less than no bytes");
  return before - change / 2 - 1;
}

Streams find_streams(const std::byte* in, const std::byte* end, size_t count) {
  Streams streams;
  streams.count = streams_of(count);
  size_t sizes[kMostStreams];
  for (size_t i = 0; i + 1 < streams.count; ++i) {
    const size_t change = read_change(in, end);
    sizes[i] = changed_size(i == 0 ? 0 : sizes[i - 1], change);
  }
  for (size_t i = 0; i < streams.count; ++i) {
    streams.begin[i] = in;
    if (i + 1 == streams.count) break;
    if (sizes[i] > static_cast<size_t>(end - in)) refuse("end within a stream of codes");
    in += sizes[i];
  }
  return streams;
}

[[noreturn]] void refuse_stream() {
  refuse("have a stream of codes that is too short or too long");
}

/// Whether symbols have so many bits that it does not pay to look for several at once. Where there
/// is one stream it is not known how long that is.
bool read_one_by_one(const Streams& streams, size_t count) {
  const size_t last = streams.count - 1, each = (count + last) / (last + 1);
  const auto bits = static_cast<double>(8 * (streams.begin[last] - streams.begin[0]));
  return bits > kOneByOneBits * static_cast<double>(last * each);
}

const std::byte* read_streams(const CodeLengths& code, const std::byte* in, const std::byte* end,
                              int8_t* symbols, size_t count) {
  const Streams streams = find_streams(in, end, count);
  DecodingTable table;
  fill(table, code, count, read_one_by_one(streams, count));
  const std::byte* const done = kernels().read_streams(table, streams, end, symbols, count);
  if (done == nullptr) refuse_stream();
  return done;
}

const std::byte* read_streams(FixedWidth code, const std::byte* in, const std::byte* end,
                              int8_t* symbols, size_t count) {
  const Streams streams = find_streams(in, end, count);
  const size_t each = (count + streams.count - 1) / streams.count;
  for (size_t i = 0;; ++i) {
    const size_t first = i * each, size = std::min(each, count - first);
    in = read_fixed_width(code, streams.begin[i], end, symbols + first, size);
    const bool is_last = i + 1 == streams.count;
    if (is_last ? in == nullptr : in != streams.begin[i + 1]) refuse_stream();
    if (is_last) return in;
  }
}

}  // namespace

const std::byte* read_symbols(const std::byte* in, const std::byte* end, int8_t* symbols,
                              size_t count) {
  if (count == 0) return in;
  const int kind = read_byte(in, end);
  if (kind >= kStandard) {
    if (kind >= kStandard + kStandardCodes) refuse("have a code of an unknown kind");
    const CodeLengths& code = standard_code(kind - kStandard).lengths;
    return read_streams(code, in, end, symbols, count);
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
  return read_streams(FixedWidth{width, first}, in, end, symbols, count);
}

}  // namespace bls::bounded
