#pragma once

#include <cstddef>
#include <memory>

namespace bls {

struct Unmap {
  size_t bytes = 0;
  void operator()(std::byte* at) const;
};

/// Zeros of this process, which take no memory before something is written to them.
using ZeroedPages = std::unique_ptr<std::byte, Unmap>;

/// Throws ChannelError (kTransport) if there is no room for them.
ZeroedPages zeroed_pages(size_t bytes);

}  // namespace bls
