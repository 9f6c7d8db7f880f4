#pragma once

#include <cstdint>

#include "tests/support/payload.h"
#include "tests/support/ranks.h"

namespace bls::testing {

/// Posts, waits and releases in any order that the bound allows, `iterations` times each, and
/// checks every byte that arrives, when it arrives and again before its release.
void random_exchange(int rank, Channel& channel, const Sizes& sizes, uint64_t iterations);

}  // namespace bls::testing
