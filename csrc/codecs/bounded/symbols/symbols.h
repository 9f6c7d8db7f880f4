#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/symbols/prefix_code.h"

/// Signed bytes by a prefix code that their counts choose (docs/wire-format.md): what the code is,
/// then one stream of codes, or several of equal shares.
namespace bls::bounded {

/// How a code is described. Standard codes are the numbers from kStandard on.
enum CodeKind : uint8_t {
  kFixedWidth = 0,  ///< and the bits, up to 8; with 0 bits all symbols are the first one
  kLengthsFollow = 9,
  kStandard = 16,
};

/// The length by which the description of a code says that a symbol has none.
constexpr int kAbsent = kLongestCode + 1;

/// The most that `write_symbols` writes, with what it may write beyond.
constexpr size_t room_for_symbols(size_t count) { return count * kLongestCode / 8 + 512; }

/// Returns the end of what it wrote. The code is the shortest one, or of fixed width.
std::byte* write_symbols(const int8_t* symbols, size_t count, bool fixed_width, std::byte* out);

/// Returns the end of what it read.
///
/// Throws ChannelError (kProtocol) if `in` does not begin with so many symbols.
const std::byte* read_symbols(const std::byte* in, const std::byte* end, int8_t* symbols,
                              size_t count);

}  // namespace bls::bounded
