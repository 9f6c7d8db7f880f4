#include "codecs/bounded/symbols/prefix_code.h"

#include <algorithm>

namespace bls::bounded {
namespace {

// Of a level no more is ever taken than of twice as many symbols.
constexpr size_t kMostItems = 2 * kSymbols;
constexpr uint64_t kNoItem = UINT64_MAX;

/// What a level of the package-merge algorithm (Larmore and Hirschberg, 1990) chooses from: the
/// symbols, and pairs of what the level below it has, by weight.
struct Level {
  std::array<uint64_t, kMostItems> weights;
  std::array<uint16_t, kMostItems + 1> symbols_of;  // among the first items, by how many these are
  size_t items = 0;
};

/// `symbols` are followed by kNoItem.
void fill(Level& level, const uint64_t* symbols, size_t most, const Level& below) {
  size_t taken = 0, pair = 0, items = 0;
  level.symbols_of[0] = 0;
  for (; items < most; ++items) {
    const uint64_t of_pair =
        pair + 1 < below.items ? below.weights[pair] + below.weights[pair + 1] : kNoItem;
    const uint64_t of_symbol = symbols[taken];
    const bool takes_symbol = of_symbol <= of_pair;
    level.weights[items] = takes_symbol ? of_symbol : of_pair;
    if (level.weights[items] == kNoItem) break;
    taken += takes_symbol;
    pair += takes_symbol ? 0 : 2;
    level.symbols_of[items + 1] = static_cast<uint16_t>(taken);
  }
  level.items = items;
}

/// Symbols that occur, the rarest first.
struct Sorted {
  std::array<uint64_t, kSymbols> by_weight;    // with the place in the low bits
  std::array<uint64_t, kSymbols + 1> weights;  // and kNoItem behind them
  size_t symbols = 0;

  explicit Sorted(const Counts& counts) {
    for (size_t place = 0; place < kSymbols; ++place) {
      if (counts[place] > 0) by_weight[symbols++] = uint64_t{counts[place]} << 8 | place;
    }
    std::sort(by_weight.begin(), by_weight.begin() + static_cast<ptrdiff_t>(symbols));
    for (size_t i = 0; i < symbols; ++i) weights[i] = by_weight[i] >> 8;
    weights[symbols] = kNoItem;
  }
  int place(size_t i) const { return static_cast<int>(by_weight[i] & 0xff); }
};

/// How many symbols have a code of each length, and the bits of all symbols.
struct Lengths {
  std::array<uint32_t, kSymbols> symbols_of{};
  uint64_t bits = 0;
};

/// Huffman's code from two queues, of symbols and of pairs: both come in the order of their
/// weights.
Lengths huffman_lengths(const Sorted& sorted) {
  const size_t pairs = sorted.symbols - 1;
  std::array<uint64_t, kSymbols> weights;  // of pairs
  std::fill_n(weights.begin(), pairs, kNoItem);
  std::array<uint16_t, kSymbols> parents;
  std::array<uint8_t, kSymbols> symbols_in;  // a pair has none, one or two
  Lengths lengths;
  size_t symbol = 0, pair = 0;
  for (size_t next = 0; next < pairs; ++next) {
    uint64_t weight = 0;
    uint32_t symbols = 0;
    for (int i = 0; i < 2; ++i) {
      const uint64_t of_symbol = sorted.weights[symbol], of_pair = weights[pair];
      const bool takes_symbol = of_symbol <= of_pair;
      weight += takes_symbol ? of_symbol : of_pair;
      // Of a pair that is not taken another one becomes the parent later.
      parents[pair] = static_cast<uint16_t>(next);
      symbols += takes_symbol;
      symbol += takes_symbol;
      pair += !takes_symbol;
    }
    weights[next] = weight;
    symbols_in[next] = static_cast<uint8_t>(symbols);
    lengths.bits += weight;  // each pair is a bit for all that is in it
  }
  std::array<uint8_t, kSymbols> depths;
  depths[pairs - 1] = 0;
  for (size_t i = pairs; i-- > 0;) {
    if (i + 1 < pairs) depths[i] = static_cast<uint8_t>(depths[parents[i]] + 1);
    lengths.symbols_of[depths[i] + 1u] += symbols_in[i];
  }
  return lengths;
}

/// Makes all lengths at most kLongestCode, and the code complete again.
void shorten(Lengths& lengths) {
  auto& symbols_of = lengths.symbols_of;
  uint32_t used = 0;  // of all that a complete code has, in parts of the longest one
  for (size_t length = kSymbols - 1; length > 0; --length) {
    if (length > kLongestCode) {
      symbols_of[kLongestCode] += symbols_of[length];
      symbols_of[length] = 0;
    } else {
      used += symbols_of[length] << (kLongestCode - length);
    }
  }
  for (; used > 1u << kLongestCode; --used) {
    size_t length = kLongestCode - 1;
    while (symbols_of[length] == 0) --length;
    // A longest code goes beside this one, for which both become a bit longer than it was.
    symbols_of[length] -= 1;
    symbols_of[length + 1] += 2;
    symbols_of[kLongestCode] -= 1;
  }
}

// Bits to each of which one more is hardly worse.
constexpr uint64_t kBitsToOneMore = 128;

}  // namespace

CodeLengths good_code(const Counts& counts) {
  const Sorted sorted(counts);
  Lengths lengths = huffman_lengths(sorted);
  shorten(lengths);
  CodeLengths code;
  size_t symbol = 0;
  uint64_t bits = 0;
  for (int length = kLongestCode; length > 0; --length) {
    for (uint32_t i = 0; i < lengths.symbols_of[static_cast<size_t>(length)]; ++i, ++symbol) {
      code.set(sorted.place(symbol), length);
      bits += sorted.weights[symbol] * static_cast<uint64_t>(length);
    }
  }
  // No code takes fewer bits than Huffman's before it was shortened.
  return bits <= lengths.bits + lengths.bits / kBitsToOneMore ? code : best_code(counts);
}

CodeLengths best_code(const Counts& counts) {
  const Sorted sorted(counts);
  const size_t symbols = sorted.symbols;
  static thread_local std::array<Level, kLongestCode> levels;
  const size_t all = 2 * symbols - 2;
  const Level nothing{};
  for (size_t i = 0; i < levels.size(); ++i) {
    fill(levels[i], sorted.weights.data(), all, i == 0 ? nothing : levels[i - 1]);
  }
  // The code of a symbol has a bit for each level that has it among what is taken.
  std::array<uint8_t, kSymbols> lengths{};
  size_t taken = all;
  for (size_t i = levels.size(); i-- > 0;) {
    const size_t of_symbols = levels[i].symbols_of[taken];
    for (size_t symbol = 0; symbol < of_symbols; ++symbol) ++lengths[symbol];
    taken = 2 * (taken - of_symbols);
  }
  CodeLengths code;
  for (size_t i = 0; i < symbols; ++i) code.set(sorted.place(i), lengths[i]);
  return code;
}

CodeLengths fixed_width_code(int first, int bits) {
  CodeLengths lengths;
  for (int i = 0; i < 1 << bits; ++i) lengths.set(first + i, bits);
  return lengths;
}

bool is_complete(const CodeLengths& lengths) {
  uint32_t used = 0;
  for (int place = lengths.first; place <= lengths.last; ++place) {
    const int length = lengths.of[static_cast<size_t>(place)];
    used += length > 0 ? 1u << (kLongestCode - length) : 0;
  }
  return used == 1u << kLongestCode;
}

}  // namespace bls::bounded
