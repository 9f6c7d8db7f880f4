#pragma once

namespace bls::bounded {

/// The first byte of encoded rows: how many low bits of each code stand apart from its symbol. With
/// none a code has eight bits, else 16.
constexpr int kMostLowBits = 8;
/// Added to these where all rows that travel are new: their kinds are left out.
constexpr int kAllNew = 16;
/// In their place: the rows are as they were.
constexpr int kAsTheyAre = 255;

}  // namespace bls::bounded
