#pragma once

#include <cstddef>
#include <span>

#include "channel/channel.h"

namespace bls {

/// Memory of the caller for what one rank gets, or what comes from it.
struct Buffer {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

/// What `source` sent, if that is one part of `bytes`. Throws kProtocol otherwise.
const std::byte* whole_part(const Arrival& arrival, int source, size_t bytes);

/// Posts `buffers[d]` to rank d, each as one part.
void post_buffers(Channel& channel, std::span<const Buffer> buffers);

/// Copies what each rank s sent to `buffers[s]`. Throws kProtocol, and copies nothing, unless every
/// message has the size of its buffer.
void collect_buffers(const Arrival& arrival, std::span<const Buffer> buffers);

}  // namespace bls
