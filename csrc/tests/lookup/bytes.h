#pragma once

#include <cstddef>

namespace bls::testing {

inline const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

}  // namespace bls::testing
