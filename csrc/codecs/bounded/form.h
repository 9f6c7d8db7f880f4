#pragma once

namespace bls::bounded {

/// The first byte of encoded rows: how many low bits of each code stand apart from its symbol. With
/// none a code has eight bits, else 16.
constexpr int kMostLowBits = 8;
/// In its place: the rows are as they were.
constexpr int kAsTheyAre = 255;

}  // namespace bls::bounded
