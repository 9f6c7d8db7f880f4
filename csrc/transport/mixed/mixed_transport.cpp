#include "transport/mixed/mixed_transport.h"

namespace bls {
namespace {

/// How long the watcher sleeps at most: longer than any sleep of a rank.
constexpr std::chrono::seconds kWatch{1};

}  // namespace

MixedTransport::MixedTransport(std::unique_ptr<ShmTransport> shm,
                               std::unique_ptr<NetworkTransport> network,
                               std::span<const int> local_ranks, int world_size)
    : shm_(std::move(shm)),
      network_(std::move(network)),
      local_ranks_(local_ranks.begin(), local_ranks.end()) {
  for (int rank = 0; rank < world_size; ++rank) ways_.push_back({network_.get(), rank});
  for (size_t i = 0; i < local_ranks_.size(); ++i) {
    ways_[static_cast<size_t>(local_ranks_[i])] = {shm_.get(), static_cast<int>(i)};
  }
  watcher_ = std::thread([this] { watch(); });
}

MixedTransport::~MixedTransport() {
  stopping_ = true;
  network_->wake_self();
  watcher_.join();
}

/// A futex and a file descriptor cannot be waited for at once. So a rank sleeps on the futex, and
/// this thread turns what the network reports into a wake-up.
void MixedTransport::watch() {
  while (!stopping_) {
    network_->await_event(Clock::now() + kWatch);
    shm_->wake_self();
  }
}

void MixedTransport::sleep(bool (*ready)(void*), void* context, Clock::time_point until) {
  struct Look {
    MixedTransport& self;
    bool (*ready)(void*);
    void* context;
  } look{*this, ready, context};
  // What completes from `arm` on wakes this rank, which has announced its sleep by then.
  const auto look_again = [](void* argument) {
    auto& [self, is_ready, of] = *static_cast<Look*>(argument);
    self.network_->arm();
    self.progress();
    return self.poisoned().load() != 0 || is_ready(of);
  };
  shm_->sleep(look_again, &look, until);
}

void MixedTransport::progress() {
  network_->progress();
  if (shm_->poisoned().load(std::memory_order_acquire) == 0) return;
  if (poisoned().load(std::memory_order_acquire) != 0) return;
  network_->adopt_poison(poison_of_host());
}

/// As it came through shared memory, in which ranks tell of other hosts' failures, too.
Poison MixedTransport::poison_of_host() const {
  Poison told = shm_->told_poison();
  if (told.origin >= 0 && static_cast<size_t>(told.origin) < ways_.size()) return told;
  // A damaged number; the teller's may be, too.
  const int teller = shm_->poison().origin;
  const bool known = teller >= 0 && static_cast<size_t>(teller) < local_ranks_.size();
  told.origin = known ? local_ranks_[static_cast<size_t>(teller)] : teller;
  return told;
}

void MixedTransport::poison_all(const std::string& message) {
  progress();  // what came first stays
  network_->poison_all(message);
  shm_->tell(poison());
}

void MixedTransport::pass_poison_on() {
  progress();
  if (poisoned().load(std::memory_order_acquire) == 0) return;
  network_->pass_poison_on();
  shm_->pass_poison_on();
  if (shm_->poisoned().load() == 0) shm_->tell(poison());
}

void MixedTransport::announce_close() {
  shm_->announce_close();
  network_->announce_close();
}

void MixedTransport::abandon() {
  shm_->abandon();
  network_->abandon();
}

}  // namespace bls
