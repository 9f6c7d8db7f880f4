#pragma once

#include "codecs/bounded/symbols/prefix_code.h"

namespace bls::bounded {

/// Codes for symbols spread about 0, which need no bytes that describe them: the first half for the
/// distribution of Laplace, the second for that of Gauss, each in steps of the fourth root of 2.
constexpr int kStandardCodes = 48;

const CodeLengths& standard_code(int number);

}  // namespace bls::bounded
