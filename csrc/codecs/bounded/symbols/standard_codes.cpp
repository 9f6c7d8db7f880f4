#include "codecs/bounded/symbols/standard_codes.h"

#include <algorithm>
#include <vector>

namespace bls::bounded {
namespace {

constexpr int kOfShape = kStandardCodes / 2;
constexpr uint32_t kMiddle = 1u << 30;       // weight of the symbol 0
constexpr uint32_t kRarest = kMiddle >> 13;  // lighter symbols have no code

/// The fraction of 2^32 next below the root of such a fraction.
uint64_t root(uint64_t fraction) {
  const uint64_t square = fraction << 32;
  uint64_t result = 0;
  for (uint64_t bit = uint64_t{1} << 31; bit > 0; bit >>= 1) {
    if ((result | bit) * (result | bit) <= square) result |= bit;
  }
  return result;
}

uint64_t product(uint64_t a, uint64_t b) { return a * b >> 32; }

/// exp(-2^(1 - i/4)) as a fraction of 2^32, of which every fourth is the root of the one before.
uint64_t decay(int i) {
  constexpr uint64_t kFirst[] = {581260615, 799036310, 1044178423, 1307656790};
  uint64_t fraction = kFirst[i % 4];
  for (; i >= 4; i -= 4) fraction = root(fraction);
  return fraction;
}

/// Integers alone, so that every machine has the same codes.
CodeLengths code_of(int number) {
  const bool gauss = number >= kOfShape;
  uint64_t step = decay(gauss ? 2 * (number - kOfShape) : number);
  const uint64_t change = gauss ? product(step, step) : 0;
  Counts weights{};
  uint64_t weight = kMiddle;
  for (int distance = 0; distance < 128 && weight >= kRarest; ++distance) {
    weights[place_of(distance)] = weights[place_of(-distance)] = static_cast<uint32_t>(weight);
    weight = product(weight, step);
    if (gauss) step = product(step, change);
  }
  return best_code(weights);
}

}  // namespace

const StandardCode& standard_code(int number) {
  static const std::vector<StandardCode> codes = [] {
    std::vector<StandardCode> all(kStandardCodes);
    for (size_t each = 0; each < all.size(); ++each) {
      all[each].lengths = code_of(static_cast<int>(each));
      std::copy_n(all[each].lengths.of.begin(), kSymbols, all[each].short_lengths.begin());
    }
    return all;
  }();
  return codes[static_cast<size_t>(number)];
}

}  // namespace bls::bounded
