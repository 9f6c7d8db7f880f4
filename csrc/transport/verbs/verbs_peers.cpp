#include "transport/verbs/verbs_transport.h"

namespace bls {
namespace {

/// A peer of which nothing was heard for so long is written to, to see whether it answers.
constexpr std::chrono::seconds kSilence{1};

}  // namespace

PeerState VerbsTransport::peer_state(int peer) {
  const std::lock_guard lock(mutex_);
  // Before the completions: all messages of a peer that has closed are among them then.
  const bool has_closed = closed(peer);
  drain();
  read_device_events();
  if (has_closed) return PeerState::kClosed;
  probe_if_silent(peer);
  return peers_[peer].fault ? peers_[peer].fault->state : PeerState::kOpen;
}

void VerbsTransport::probe_if_silent(int index) {
  Peer& peer = peers_[index];
  if (!peer.queue || peer.fault) return;
  const Clock::time_point now = Clock::now();
  if (std::exchange(peer.heard, false)) peer.last_heard = now;
  // What is under way will be answered, or fail, by itself.
  if (now - peer.last_heard > kSilence && peer.queue->in_flight() == 0) tell_credit(index);
}

std::string VerbsTransport::peer_fault(int peer) {
  const std::lock_guard lock(mutex_);
  return peers_[peer].fault ? peers_[peer].fault->text : std::string();
}

bool VerbsTransport::closed(int peer) const {
  return block_of(peer).closed.load(std::memory_order_acquire) != 0;
}

void VerbsTransport::lose(int peer, PeerState state, const std::string& what) {
  if (peers_[peer].fault) return;
  peers_[peer].fault = {state, device_.label() + ": " + what};
  // It may still be connected, and would wait for this rank until the deadline.
  peers_[peer].queue->break_off();
}

void VerbsTransport::lose_all(const std::string& what) {
  for (int peer = 0; peer < shape_.world_size; ++peer) {
    if (peers_[peer].queue) lose(peer, PeerState::kFailed, what);
  }
}

void VerbsTransport::announce_close() {
  std::unique_lock lock(mutex_);
  drain();
  for (int index = 0; index < shape_.world_size; ++index) {
    if (!peers_[index].queue) continue;
    // Also to those that have closed: they may be keeping a large message for this rank.
    write_word(index, offsetof(PeerBlock, closed), 1);
  }
  block_of(shape_.rank).closed.store(1, std::memory_order_release);
  // Nobody expects anything of a rank that has failed, and one of its peers may be dead.
  latch_poison();
  flush(lock, poison_ ? kPoisonGrace : deadline_, interrupt_);
}

/// Lets what is under way leave, except to peers that do not want it any more.
void VerbsTransport::flush(std::unique_lock<std::mutex>& lock, Clock::duration limit,
                           const Interrupt& interrupt) {
  await(lock, limit, interrupt, [&] {
    for (int index = 0; index < shape_.world_size; ++index) {
      const Peer& peer = peers_[index];
      if (peer.queue && !peer.fault && !closed(index) && peer.queue->in_flight() > 0) return false;
    }
    return true;
  });
}

}  // namespace bls
