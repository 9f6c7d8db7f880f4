#pragma once

#include <cstddef>
#include <string_view>

namespace bls {

/// Most bytes of the name of a version.
constexpr size_t kLongestVersion = 64;

/// Whether a text may name a version of the weights: 1 to 64 bytes of UTF-8, none of which is zero.
bool is_version(std::string_view text);

}  // namespace bls
