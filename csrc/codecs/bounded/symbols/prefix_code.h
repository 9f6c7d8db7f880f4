#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace bls::bounded {

constexpr int kLongestCode = 11;
constexpr int kSymbols = 256;

/// Symbols are signed bytes; arrays have them in their order, -128 first.
constexpr int place_of(int symbol) { return symbol + 128; }

/// How often each symbol occurs.
using Counts = std::array<uint32_t, kSymbols>;

/// A prefix code: the bits of each symbol's code, 0 where it has none. The codes themselves follow
/// from that (canonical): shorter ones are smaller, and among equally long ones those of smaller
/// symbols.
struct CodeLengths {
  std::array<uint8_t, kSymbols> of{};
  int first = kSymbols;  ///< place of the first symbol that has a code
  int last = -1;

  void set(int place, int length) {
    of[static_cast<size_t>(place)] = static_cast<uint8_t>(length);
    if (place < first) first = place;
    if (place > last) last = place;
  }
};

/// The best code for symbols that occur so often, no code longer than kLongestCode.
///
/// At least two symbols occur.
CodeLengths best_code(const Counts& counts);

/// A code for symbols that occur so often, no code longer than kLongestCode: Huffman's, if need be
/// with codes shortened, which is found sooner than the best one; and that where shortening costs
/// more than one bit in 128.
///
/// At least two symbols occur.
CodeLengths good_code(const Counts& counts);

/// All symbols from `first` on that `bits` can tell apart.
CodeLengths fixed_width_code(int first, int bits);

/// Whether every sequence of bits is one of codes: none is missing and none is there twice.
bool is_complete(const CodeLengths& lengths);

/// Calls `use(place, length, code)` for each code in its order, which is that of its bits.
template <typename Use>
void for_each_code(const CodeLengths& lengths, Use use) {
  const auto length_at = [&](int place) { return lengths.of[static_cast<size_t>(place)]; };
  std::array<uint16_t, kLongestCode + 2> begin{};  // where places of each length come
  for (int place = lengths.first; place <= lengths.last; ++place) ++begin[length_at(place) + 1u];
  begin[1] = 0;  // those without a code come nowhere
  for (size_t length = 1; length <= kLongestCode; ++length) begin[length + 1] += begin[length];
  const size_t count = begin[kLongestCode + 1];
  std::array<uint8_t, kSymbols> places;
  for (int place = lengths.first; place <= lengths.last; ++place) {
    if (length_at(place) > 0) places[begin[length_at(place)]++] = static_cast<uint8_t>(place);
  }
  uint32_t code = 0;
  int before = 0;
  for (size_t i = 0; i < count; ++i) {
    const int place = places[i], length = length_at(place);
    code <<= length - before;
    use(place, length, code++);
    before = length;
  }
}

}  // namespace bls::bounded
