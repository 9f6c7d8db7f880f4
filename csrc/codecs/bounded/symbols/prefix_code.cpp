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

}  // namespace

CodeLengths best_code(const Counts& counts) {
  std::array<uint64_t, kSymbols + 1> by_weight;  // with the place in the low bits
  size_t symbols = 0;
  for (size_t place = 0; place < kSymbols; ++place) {
    if (counts[place] > 0) by_weight[symbols++] = uint64_t{counts[place]} << 8 | place;
  }
  std::sort(by_weight.begin(), by_weight.begin() + static_cast<ptrdiff_t>(symbols));
  std::array<uint64_t, kSymbols + 1> weights;
  for (size_t i = 0; i < symbols; ++i) weights[i] = by_weight[i] >> 8;
  weights[symbols] = kNoItem;

  static thread_local std::array<Level, kLongestCode> levels;
  const size_t all = 2 * symbols - 2;
  const Level nothing{};
  for (size_t i = 0; i < levels.size(); ++i) {
    fill(levels[i], weights.data(), all, i == 0 ? nothing : levels[i - 1]);
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
  for (size_t i = 0; i < symbols; ++i) code.set(static_cast<int>(by_weight[i] & 0xff), lengths[i]);
  return code;
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
