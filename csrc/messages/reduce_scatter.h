#pragma once

#include <span>

#include "channel/channel.h"

namespace bls {

/// Writes to `output` the sum of what all ranks sent to `rank`, one part of floats of the size of
/// `output` each. Throws kProtocol, and writes nothing, when a message has another size.
///
/// Sums of floats depend on their order. This one is that of gloo's ring all-reduce over the
/// outputs of all ranks, one after the other, so that the results are gloo's, bit for bit: the ring
/// carries chunk c from rank c - 1 down to rank c.
void collect_sum(const Arrival& arrival, int rank, std::span<float> output);

}  // namespace bls
