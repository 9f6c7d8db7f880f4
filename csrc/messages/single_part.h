#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "channel/message.h"
#include "errors.h"

namespace bls {

/// The part of a message that consists of exactly one; null for all others.
inline const View* single_part(const Arrival& arrival, int source) {
  const auto parts = arrival.parts(source);
  return parts.size() == 1 ? parts.data() : nullptr;
}

/// What is wrong with `found` bytes from the rank of the name `source` where `expected` are due.
using Misfit = std::string (*)(const std::string& source, uint64_t found, uint64_t expected);

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_part(const Arrival& arrival, int source,
                                                               const View* part, uint64_t expected,
                                                               Misfit misfit) {
  throw ChannelError(ErrorKind::kProtocol, misfit(arrival.names().of(source),
                                                  part != nullptr ? part->bytes : 0, expected));
}

/// The bytes of a message of exactly one part of `bytes`. Throws ChannelError(kProtocol) with the
/// text of `misfit` for all others, of which several parts count as zero bytes.
inline const std::byte* single_part(const Arrival& arrival, int source, uint64_t bytes,
                                    Misfit misfit) {
  const View* const part = single_part(arrival, source);
  if (part == nullptr || part->bytes != bytes) refuse_part(arrival, source, part, bytes, misfit);
  return part->data;
}

}  // namespace bls
