#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/support/checks.h"
#include "tests/verbs/verbs_ranks.h"

namespace bls::testing {

/// Ranks over one fake, whose connections a test can break.
struct FakeRanks {
  explicit FakeRanks(const Setup& setup, const FakeDevice& device = {}, uint64_t seed = 1);

  Channel& operator[](int rank) { return (*ranks)[rank]; }
  /// Number of the queue pair of `rank` for `peer`.
  uint32_t pair(int rank, int peer) const {
    return addresses[static_cast<size_t>(rank)].queue_pairs[static_cast<size_t>(peer)];
  }

  std::shared_ptr<FakeIbverbs> library;
  std::vector<VerbsAddress> addresses;
  std::vector<ibv_context*> contexts;
  std::unique_ptr<Ranks> ranks;
};

/// Waits until `rank` has learned of poison, which leaves a rank within its grace and may take
/// longer to arrive.
void await_poison(Transport& rank);
/// `rank` has been poisoned, with `text`.
void check_poisoned(FakeRanks& ranks, int rank, const std::string& text);

/// Lets two ranks read two messages of each other, and rank 0 send one more that the device does
/// not complete. Returns the outbox that it stands in, which is the next post's.
std::byte* leave_outbox_in_use(FakeRanks& ranks);

}  // namespace bls::testing
