#include "codecs/bounded/grid.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "codecs/bounded/bounded.h"

namespace bls::bounded {
namespace {

// Neither scales nor their inverses are subnormal, which some processors round to zero, and no
// product of a code is beyond the floats.
constexpr float kLeastBound = 0x1p-126f, kGreatestBound = 0x1p110f;

}  // namespace

void check_bound(float bound) {
  if (bound >= kLeastBound && bound <= kGreatestBound) return;
  throw std::invalid_argument("an error bound is " + std::to_string(bound) +
                              ", but must be a positive number from 2^-126 to 2^110");
}

Grid grid_of(float bound, int bits) {
  const double widest = 2.0 * bound * (1 - std::ldexp(1.0, bits - 23));
  // A double has 53 significant bits.
  const uint64_t rounded_down = std::bit_cast<uint64_t>(widest) >> (29 + bits) << (29 + bits);
  const auto scale = static_cast<float>(std::bit_cast<double>(rounded_down));
  const auto greatest_code = static_cast<float>((1 << (bits - 1)) - 1);
  return {scale, 1 / scale, greatest_code * scale};
}

}  // namespace bls::bounded
