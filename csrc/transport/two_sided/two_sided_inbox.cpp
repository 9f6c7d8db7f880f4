#include "transport/two_sided/two_sided_inbox.h"

namespace bls {
namespace {

/// What is known about a lost peer is told within this time of the failure of an exchange.
constexpr std::chrono::seconds kTimeToBlame{1};

}  // namespace

TwoSidedInbox::TwoSidedInbox(const Slots& slots)
    : slots_(slots), peers_(static_cast<size_t>(slots.shape.world_size)) {
  ring_bytes(peers_.size(), slots.shape.slots, slots.shape.slot_bytes);  // or sizes overflow
}

template <class Change>
void TwoSidedInbox::note(Change change) {
  {
    const std::lock_guard lock(mutex_);
    change();
    ++changes_;
  }
  changed_.notify_all();
}

void TwoSidedInbox::arrived(int peer, uint64_t sequence) {
  Peer& source = peers_.at(static_cast<size_t>(peer));
  const auto round = static_cast<uint32_t>(sequence % slots_.shape.slots);
  arrival_word(slots_.slot(peer, round)).store(sequence + 1, std::memory_order_release);
  note([&] { source.arrived = sequence + 1; });
}

void TwoSidedInbox::posted(int peer, uint64_t count) {
  note([&] { peers_.at(static_cast<size_t>(peer)).posted = count; });
}

void TwoSidedInbox::read(int peer, uint64_t count) {
  note([&] { peers_.at(static_cast<size_t>(peer)).read = count; });
}

void TwoSidedInbox::ended(int peer, uint64_t count) {
  note([&] { peers_.at(static_cast<size_t>(peer)).ended = count; });
}

void TwoSidedInbox::closed(int peer, uint64_t count) {
  note([&] {
    Peer& closing = peers_.at(static_cast<size_t>(peer));
    closing.posted = count;
    closing.closed = true;
  });
}

void TwoSidedInbox::lost(int peer, PeerState state, const std::string& fault) {
  note([&] {
    Peer& gone = peers_.at(static_cast<size_t>(peer));
    gone.lost = state;
    gone.fault = fault;
  });
}

void TwoSidedInbox::failed(const std::string& fault) {
  note([&] {
    if (!failure_.empty()) return;
    failure_ = fault;
    failed_at_ = Clock::now();
  });
}

bool TwoSidedInbox::poison(int origin, const std::string& message) {
  bool first = false;
  note([&] {
    first = poisoned_.load() == 0;
    if (!first) return;
    poison_ = {origin, message};
    poisoned_.store(1, std::memory_order_release);
  });
  return first;
}

void TwoSidedInbox::wake() {
  note([] {});
}

Poison TwoSidedInbox::kept_poison() const {
  const std::lock_guard lock(mutex_);
  return poison_;
}

PeerState TwoSidedInbox::state_of(int peer) const {
  const std::lock_guard lock(mutex_);
  const Peer& of = peers_[static_cast<size_t>(peer)];
  // What it sent before it closed may still be on its way.
  if (of.closed && of.posted <= of.arrived) return PeerState::kClosed;
  if (of.lost != PeerState::kOpen) return of.lost;
  const bool failed = !failure_.empty() && Clock::now() >= failed_at_ + kTimeToBlame;
  return failed ? PeerState::kFailed : PeerState::kOpen;
}

bool TwoSidedInbox::still_reads(int peer) const {
  {
    const std::lock_guard lock(mutex_);
    if (peers_[static_cast<size_t>(peer)].closed) return false;
  }
  return state_of(peer) == PeerState::kOpen;
}

std::string TwoSidedInbox::fault_of(int peer) const {
  const std::lock_guard lock(mutex_);
  const Peer& of = peers_[static_cast<size_t>(peer)];
  return of.lost != PeerState::kOpen ? of.fault : failure_;
}

uint64_t TwoSidedInbox::read_by(int peer) const {
  const std::lock_guard lock(mutex_);
  return peers_[static_cast<size_t>(peer)].read;
}

uint64_t TwoSidedInbox::ended_by(int peer) const {
  const std::lock_guard lock(mutex_);
  return peers_[static_cast<size_t>(peer)].ended;
}

bool TwoSidedInbox::has_posted(int peer, uint64_t sequence, Clock::time_point until) const {
  std::unique_lock lock(mutex_);
  const auto known = [&] { return peers_[static_cast<size_t>(peer)].posted > sequence; };
  return changed_.wait_until(lock, until, known);
}

void TwoSidedInbox::sleep(bool (*ready)(void*), void* context, Clock::time_point until) {
  std::unique_lock lock(mutex_);
  const uint64_t before = changes_;
  lock.unlock();  // `ready` may fail, which takes the lock
  if (ready(context) || poisoned_.load() != 0) return;
  lock.lock();
  changed_.wait_until(lock, until, [&] { return changes_ != before; });
}

}  // namespace bls
