#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/payload.h"
#include "tests/support/ranks.h"
#include "transport/two_sided/two_sided_inbox.h"
#include "transport/two_sided/two_sided_transport.h"

namespace bls::testing {

/// What is under way between the ranks of one process that have a TwoSidedTransport.
class TwoSidedMesh {
 public:
  explicit TwoSidedMesh(const Setup& setup);

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  struct Rank {
    explicit Rank(const RingShape& shape);

    std::vector<Line> inbox_memory;
    std::vector<Line> outbox_memory;
    const Slots outboxes;
    const std::shared_ptr<TwoSidedInbox> inbox;
    // Under the mutex of the mesh:
    std::map<std::pair<int, uint64_t>, Bytes> slots;  // that were sent to it: (source, sequence)
    std::map<std::pair<int, uint32_t>, Bytes> large;  // (source, slot)
    std::deque<std::function<void()>> notes;
    uint64_t told = 0;
    uint64_t heard = 0;
    uint64_t started = 0;
    bool gone = false;
  };

  int world_size() const { return static_cast<int>(ranks.size()); }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Rank>> ranks;
};

/// Does what a messenger over a network does, with the same threads: one completes the rounds, one
/// hears what the peers tell. They read and write slots without a lock, so that a thread sanitizer
/// sees a slot that is used too early.
class MeshMessenger final : public Messenger {
 public:
  MeshMessenger(std::shared_ptr<TwoSidedMesh> mesh, int rank);
  ~MeshMessenger() override;

  void exchange(uint32_t slot, uint64_t sequence, std::span<const size_t> bytes) override;
  std::byte* expose(int destination, uint32_t slot, size_t bytes) override;
  void retract(int destination, uint32_t slot) override { exposed_.erase({destination, slot}); }
  const std::byte* pull(int source, uint32_t slot, size_t bytes) override;
  void drop(int source, uint32_t slot) override { pulled_.erase({source, slot}); }
  void return_credit(int source, uint64_t consumed) override;
  void ask(int peer) override;
  void ask_for_end(int peer) override;
  void spread_poison(int origin, const std::string& message) override;
  void close(uint64_t posted) override;
  void leave() override {}

 private:
  using Lock = std::unique_lock<std::mutex>;
  using News = std::function<void(TwoSidedInbox&)>;
  struct Large {
    int destination;
    const std::byte* data;
    size_t bytes;
  };
  struct Round {
    uint32_t slot;
    uint64_t sequence;
    std::vector<Large> large;
  };

  TwoSidedMesh::Rank& own() { return *mesh_->ranks[static_cast<size_t>(rank_)]; }
  void carry_rounds();
  void send(Lock& lock);
  bool is_complete();
  void complete(Lock& lock);
  void hear();
  void tell(int peer, std::function<void()> note);
  /// Tells all peers and returns when they have heard it.
  void tell_all(const News& news);

  const std::shared_ptr<TwoSidedMesh> mesh_;
  const int rank_;
  std::map<std::pair<int, uint32_t>, Bytes> exposed_;  // (destination, slot)
  std::map<std::pair<int, uint32_t>, Bytes> pulled_;   // (source, slot)
  std::vector<Large> leaving_;                         // with the next round
  // Under the mutex of the mesh:
  std::deque<Round> to_send_;
  std::deque<Round> to_complete_;
  std::thread rounds_;
  std::thread listener_;
};

/// Transports over such messengers.
Transports two_sided_transports(const Setup& setup);

}  // namespace bls::testing
