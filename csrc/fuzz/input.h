#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "channel/message.h"
#include "errors.h"

namespace bls::fuzzing {

/// The bytes of one run, used up from the front; zeros come after them.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : bytes_(std::as_bytes(std::span(data, size))) {}

  template <class Number>
  Number take() {
    Number number{};
    const size_t count = std::min(sizeof(number), bytes_.size());
    if (count != 0) std::memcpy(&number, bytes_.data(), count);
    bytes_ = bytes_.subspan(count);
    return number;
  }
  /// A number from [0, most].
  size_t take_up_to(size_t most) { return take<uint8_t>() % (most + 1); }
  std::vector<std::byte> take_bytes(size_t count) {
    std::vector<std::byte> bytes(count);
    const size_t there = std::min(count, bytes_.size());
    std::copy_n(bytes_.begin(), there, bytes.begin());
    bytes_ = bytes_.subspan(there);
    return bytes;
  }
  size_t left() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
};

/// Ends the program with a finding unless `condition` holds.
inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "finding: %s\n", what);
  std::abort();
}

/// False when `body` refused what it read, by an error that the channel documents for this. Every
/// other exception is a finding: nobody catches it.
template <class Body>
bool accepts(Body body) {
  try {
    body();
  } catch (const ChannelError& error) {
    require(error.kind() == ErrorKind::kProtocol || error.kind() == ErrorKind::kRendezvous,
            error.what());
    return false;
  }
  return true;
}

/// Reads every byte, so that the address sanitizer or the kernel sees one that is not there.
inline void touch(const View& view) {
  const volatile std::byte* const bytes = view.data;
  for (size_t i = 0; i < view.bytes; ++i) static_cast<void>(bytes[i]);
}

/// The number that the next descriptor gets: the lowest that is free.
inline int next_descriptor() {
  const int lowest = dup(STDERR_FILENO);
  require(lowest >= 0, "no descriptor is free");
  close(lowest);
  return lowest;
}

}  // namespace bls::fuzzing
