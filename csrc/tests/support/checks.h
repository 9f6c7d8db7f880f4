#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <optional>
#include <string>

#include "tests/support/payload.h"
#include "tests/support/ranks.h"

namespace bls::testing {

using std::chrono::milliseconds;

/// Whether an emulator of another processor runs this, which lacks `what` of the kernel; and says
/// so.
inline bool emulator_lacks([[maybe_unused]] const char* what) {
#ifdef BLS_EMULATED
  MESSAGE("skipped: an emulator has no " << what);
  return true;
#else
  return false;
#endif
}

/// Posts `text` to all other ranks.
inline void post_text(Channel& channel, const std::string& text = "text") {
  Outgoing outgoing(channel.config().world_size);
  for (int rank = 0; rank < channel.config().world_size; ++rank) {
    if (rank != channel.config().rank) outgoing.add(rank, bytes_of(text));
  }
  channel.post(outgoing.messages());
}

/// There has to be a failure of that kind, with `text` somewhere in its own.
inline void check_failure(const std::optional<Failure>& failure, std::optional<ErrorKind> kind,
                          const std::string& text) {
  REQUIRE(failure);
  CHECK_MESSAGE(failure->kind == kind, failure->message);
  CHECK_MESSAGE(failure->message.find(text) != std::string::npos, failure->message);
}

}  // namespace bls::testing
