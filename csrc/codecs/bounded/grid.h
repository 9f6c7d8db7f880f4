#pragma once

namespace bls::bounded {

/// The multiples of `scale` that codes of so many bits stand for: x' = q * scale, which no rounding
/// touches, with q = x * inverse rounded to even.
///
/// The scale is a little less than twice the bound, so that what the two roundings of x * inverse
/// may add to half a step is still within the bound. It has 24 - bits significant bits: with those
/// of a code there is room in a float for their product.
struct Grid {
  float scale;
  float inverse;
  float limit;  ///< the greatest magnitude that has a code
};

/// `bits` are 8 or 16.
Grid grid_of(float bound, int bits);

}  // namespace bls::bounded
