#pragma once

#include <list>
#include <vector>

#include "fuzz/input.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

namespace bls::fuzzing {

using testing::Bytes;

/// Of the targets that read one message of each rank.
constexpr int kWorldSize = 3;

/// What rank 0 gets when every rank sends it parts with arbitrary bytes through a sound channel.
class HostileArrival {
 public:
  /// `parts[s]` come from rank s.
  explicit HostileArrival(std::vector<std::vector<Bytes>> parts)
      : setup_{.world_size = static_cast<int>(parts.size()), .slot_bytes = kMinSlotBytes},
        ranks_(setup_, testing::heap_transports(setup_)) {
    for (int source = 0; source < setup_.world_size; ++source) {
      testing::Outgoing& outgoing = outgoing_.emplace_back(setup_.world_size);
      for (Bytes& part : parts[static_cast<size_t>(source)]) {
        outgoing.add(0, std::move(part));
      }
      ranks_[source].post(outgoing.messages());
    }
    arrival_ = &ranks_[0].wait();
  }

  const Arrival& operator*() const { return *arrival_; }

 private:
  testing::Setup setup_;
  std::list<testing::Outgoing> outgoing_;  // rank 0 reads its own parts where they are
  testing::Ranks ranks_;
  const Arrival* arrival_;
};

}  // namespace bls::fuzzing
