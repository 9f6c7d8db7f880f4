#pragma once

#include <cstddef>
#include <cstdint>

namespace bls::bounded {

/// Streams of codes of so many bits, from 1 to 8, for the symbols from the one at `first` on
/// (`place_of`): eight at a time, which take as many whole bytes as one has bits.
struct FixedWidth {
  int bits;
  int first;
};

/// Returns the end of the stream; writes up to eight bytes beyond.
std::byte* write_fixed_width(FixedWidth code, const int8_t* symbols, size_t count, std::byte* out);

/// Returns the end of the stream, or null if it goes beyond `end` or has other bits than 0 behind
/// its last code.
const std::byte* read_fixed_width(FixedWidth code, const std::byte* in, const std::byte* end,
                                  int8_t* symbols, size_t count);

}  // namespace bls::bounded
