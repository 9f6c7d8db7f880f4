#include "codecs/bounded/symbols/prefix_code.h"

#include <algorithm>
#include <bitset>
#include <span>

namespace bls::bounded {
namespace {

// Of a level no more is ever taken than its share of twice as many symbols.
constexpr size_t kMostItems = 2 * kSymbols;

/// What a level of the package-merge algorithm (Larmore and Hirschberg, 1990) chooses from: the
/// symbols, and pairs of what the level below it has, by weight.
struct Level {
  std::array<uint64_t, kMostItems> weights;
  std::bitset<kMostItems> is_symbol;
  size_t items = 0;

  void add(uint64_t weight, bool symbol) {
    weights[items] = weight;
    is_symbol[items++] = symbol;
  }
};

void fill(Level& level, std::span<const uint64_t> symbols, const Level& below) {
  const size_t pairs = below.items / 2, most = 2 * symbols.size() - 2;
  size_t symbol = 0, pair = 0;
  level.items = 0;
  while (level.items < most && (symbol < symbols.size() || pair < pairs)) {
    const uint64_t of_pair =
        pair < pairs ? below.weights[2 * pair] + below.weights[2 * pair + 1] : UINT64_MAX;
    const bool takes_symbol = symbol < symbols.size() && symbols[symbol] <= of_pair;
    level.add(takes_symbol ? symbols[symbol++] : of_pair, takes_symbol);
    pair += !takes_symbol;
  }
}

}  // namespace

CodeLengths best_code(const Counts& counts) {
  std::array<uint64_t, kSymbols> by_weight;  // with the place in the low bits
  size_t symbols = 0;
  for (size_t place = 0; place < kSymbols; ++place) {
    if (counts[place] > 0) by_weight[symbols++] = uint64_t{counts[place]} << 8 | place;
  }
  std::sort(by_weight.begin(), by_weight.begin() + symbols);
  std::array<uint64_t, kSymbols> weights;
  for (size_t i = 0; i < symbols; ++i) weights[i] = by_weight[i] >> 8;

  static thread_local std::array<Level, kLongestCode> levels;
  Level nothing;
  for (int i = 0; i < kLongestCode; ++i) {
    fill(levels[i], std::span(weights).first(symbols), i == 0 ? nothing : levels[i - 1]);
  }
  std::array<int, kSymbols> taken{};  // by how many levels, in the order of weights
  size_t items = 2 * symbols - 2;
  for (int i = kLongestCode - 1; i >= 0; --i) {
    size_t of_symbols = 0;
    for (size_t item = 0; item < items; ++item) of_symbols += levels[i].is_symbol[item];
    for (size_t symbol = 0; symbol < of_symbols; ++symbol) ++taken[symbol];
    items = 2 * (items - of_symbols);
  }
  CodeLengths lengths;
  for (size_t i = 0; i < symbols; ++i) {
    lengths.set(static_cast<int>(by_weight[i] & 0xff), taken[i]);
  }
  return lengths;
}

CodeLengths fixed_width_code(int first, int bits) {
  CodeLengths lengths;
  for (int i = 0; i < 1 << bits; ++i) lengths.set(first + i, bits);
  return lengths;
}

bool is_complete(const CodeLengths& lengths) {
  uint32_t used = 0;
  for (const uint8_t length : lengths.of) {
    if (length > 0) used += 1u << kLongestCode >> length;
  }
  return used == 1u << kLongestCode;
}

}  // namespace bls::bounded
