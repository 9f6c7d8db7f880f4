#pragma once

#include "transport/transport.h"

namespace bls {

/// A transport between hosts, which can be had together with shared memory (MixedTransport):
/// another thread waits for its events.
class NetworkTransport : public Transport {
 public:
  /// From here on the next event ends `await_event`.
  virtual void arm() = 0;
  /// Returns after an event that came since `arm`, after `wake_self`, or at `until`.
  virtual void await_event(Clock::time_point until) = 0;
  /// Takes poison that came by another way for the first, unless there is one. Tells nobody.
  virtual void adopt_poison(const Poison& poison) = 0;
};

}  // namespace bls
