#pragma once

#include "codecs/bounded/symbols/prefix_code.h"

namespace bls::bounded {

/// Codes for symbols spread about 0, which need no bytes that describe them: the first half for the
/// distribution of Laplace, the second for that of Gauss, each in steps of the fourth root of 2.
constexpr int kStandardCodes = 48;

/// Lengths as short numbers, 0 where there is no code.
using StandardLengths = std::array<int16_t, kSymbols>;

struct StandardCode {
  CodeLengths lengths;
  StandardLengths short_lengths;
};

const StandardCode& standard_code(int number);

}  // namespace bls::bounded
