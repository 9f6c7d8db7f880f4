#include <thread>

#include "channel/channel.h"

namespace bls {
namespace {

// A process that ends loses its memory a moment before it counts as dead.
constexpr std::chrono::milliseconds kDying{500};

}  // namespace

void Channel::check_running() {
  if (gate_.shut()) throw channel_errors::closed_meanwhile(at(completed_));
  if (poisoned()) raise_poison();
}

void Channel::check_interrupt(const End& end) {
  if (!config_.interrupt) return;
  if (Clock::now() >= *end - config_.deadline + kBeforeInterrupt) ask_interrupt();
}

void Channel::ask_interrupt() {
  // What is asked may close the channel, and must not wait for this very call to end.
  const bool in_call = gate_.step_out();
  try {
    config_.interrupt();
  } catch (const Interruption& interruption) {
    // What has arrived is not read, and this rank may not come back for it.
    poison(interruption.what());
    throw;
  }
  if (!in_call) return;
  gate_.step_in();
  check_running();
}

void Channel::check_all_alive(uint64_t sequence) {
  // Not only the awaited peer: it may be slow, and another one that is awaited later dead.
  for (int peer = 0; peer < config_.world_size; ++peer) {
    if (peer != config_.rank) check_alive(peer, sequence, "to send");
  }
}

void Channel::check_alive(int peer, uint64_t sequence, const char* doing) {
  const PeerState state = transport_->peer_state(peer);
  if (state == PeerState::kOpen) return;
  // What it sent before it went counts.
  if (sequence < posted_ && arrived(peer, round_of(sequence), sequence)) return;
  fail_gone(peer, state, sequence, doing);
}

/// The peers that have not sent: not those whose message is late because of another's.
std::vector<channel_errors::Missing> Channel::missing_peers(uint64_t sequence) {
  std::vector<channel_errors::Missing> peers;
  for (int peer = 0; peer < config_.world_size; ++peer) {
    if (peer == config_.rank || arrived(peer, round_of(sequence), sequence)) continue;
    if (!transport_->on_its_way(peer, sequence)) peers.emplace_back(peer, PeerState::kOpen);
  }
  for (auto& [peer, state] : peers) state = transport_->peer_state(peer);
  return peers;
}

void Channel::fail_gone(int peer, PeerState state, uint64_t sequence, const char* doing) {
  // A peer that went because of a failure, its own or another rank's, has told of it before. Where
  // poison comes by two ways it may not have been taken over yet.
  transport_->progress();
  if (poisoned()) raise_poison();
  fail(channel_errors::gone(at(sequence), peer, state, doing, transport_->peer_fault(peer)));
}

void Channel::fail_overwritten(int source, const Round& round, uint64_t sequence) {
  const uint64_t found = arrival_word(round.pairs[source].inbox).load() - 1;
  fail(channel_errors::overwritten(at(sequence), source, found));
}

void Channel::fail_credit(int source, uint64_t credit) {
  fail(channel_errors::impossible_credit(at(completed_), source, credit, posted_));
}

void Channel::fail_other_call(int source, uint32_t theirs) {
  fail(channel_errors::other_call(at(completed_), source, theirs, next_wait_->label));
}

/// What comes from below this class knows neither the channel nor the lag.
void Channel::fail_damaged(int source, const std::exception& error) {
  fail(channel_errors::damaged(at(completed_), source, error));
}

/// A message of `source` that stands outside its slot could not be had.
void Channel::fail_unread(int source, const PartLayout& layout, const std::exception& error) {
  const auto* const known = dynamic_cast<const ChannelError*>(&error);
  const ErrorKind kind = known != nullptr ? known->kind() : ErrorKind::kTransport;
  // The memory goes with the process.
  const Clock::time_point end = Clock::now() + kDying;
  PeerState state = transport_->peer_state(source);
  while (state == PeerState::kOpen && kind == ErrorKind::kRendezvous && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    state = transport_->peer_state(source);
  }
  if (state != PeerState::kOpen) fail_gone(source, state, completed_, "to be read");
  if (poisoned()) raise_poison();
  if (kind == ErrorKind::kProtocol) fail_damaged(source, error);
  const uint64_t slot_bytes = align_part(header_bytes(layout.count), 64) + layout.end;
  fail(channel_errors::unreadable(at(completed_), source, kind, error, slot_bytes));
}

void Channel::fail(const ChannelError& error) {
  transport_->poison_all(error.what());
  throw error;
}

void Channel::raise_poison() {
  // Before this rank can close: nobody may take it for the one that failed.
  transport_->pass_poison_on();
  throw channel_errors::poisoned(at(completed_), transport_->poison());
}

void Channel::raise_closed() const {
  throw abandoned_ ? channel_errors::forked_child(config_) : channel_errors::closed(config_);
}

}  // namespace bls
