#include <algorithm>

#include "channel/call_label.h"
#include "channel/channel.h"

namespace bls {
namespace {

// A dead peer wakes nobody: a sleeping rank looks for itself this often.
constexpr std::chrono::milliseconds kLivenessSlice{20};

}  // namespace

const Arrival& Channel::wait() {
  const CallGuard guard(*this);
  if (completed_ == posted_) refuse(channel_errors::nothing_posted);
  if (polled_) transport_->progress();
  Arrival& arrival = next_wait_->arrival;
  End end;
  for (int step = 1; step < config_.world_size; ++step) {
    // In the order in which the peers send to this rank.
    const int source = config_.rank - step;
    receive(source < 0 ? source + config_.world_size : source, arrival, end);
  }
  advance(next_wait_);
  ++completed_;
  return arrival;
}

bool Channel::ready() {
  const CallGuard guard(*this);
  if (completed_ == posted_) refuse(channel_errors::nothing_posted);
  if (polled_) transport_->progress();
  if (poisoned()) return true;
  bool complete = true;
  for (int source = 0; source < config_.world_size; ++source) {
    if (source == config_.rank || arrived(source, *next_wait_, completed_)) continue;
    if (transport_->peer_state(source) != PeerState::kOpen) return true;
    complete = false;
  }
  return complete;
}

void Channel::receive(int source, Arrival& arrival, End& end) {
  record_lag(source);
  const auto has_arrived = [this, source] {
    if (polled_) transport_->progress();
    return arrived(source, *next_wait_, completed_);
  };
  if (!arrived(source, *next_wait_, completed_) && !spin_until(policy_, has_arrived)) [[unlikely]]
    await_message(source, end);
  const PairSlot& pair = next_wait_->pairs[source];
  View* views = arrival.views_.data() + static_cast<size_t>(source) * kMaxParts;
  size_t& parts = arrival.counts_[source];
  uint32_t credit;
  if (pair.pulled_for != 0 || !parse_in_slot(pair.inbox, source, slot_bytes_, next_wait_->label,
                                             views, parts, credit)) [[unlikely]] {
    credit = receive_any(source, views, parts);
  }
  take_credit(source, credit);
}

/// For messages that are pulled, follow a pulled one, or are damaged.
uint32_t Channel::receive_any(int source, View* views, size_t& parts) {
  PairSlot& pair = next_wait_->pairs[source];
  ParsedMessage message;
  try {
    parse_message(pair.inbox, {source, slot_bytes_}, message);
  } catch (const ChannelError& error) {
    fail_damaged(source, error);
  }
  if (!same_call(message.label, next_wait_->label)) fail_other_call(source, message.label);
  const PartLayout& layout = message.layout;
  const std::byte* base = pair.inbox;
  try {
    if (message.pulled) {
      base = transport_->pull(source, slot_of(*next_wait_), message.address, layout.end);
      pair.pulled_for = kKeepPulled;
      // From here on: a sender that closes keeps its memory until it knows of the release.
      credit_word_needed_ = true;
    } else if (pair.pulled_for != 0 && --pair.pulled_for == 0) {
      transport_->drop(source, slot_of(*next_wait_));
    }
  } catch (const Interruption& interruption) {
    poison(interruption.what());
    throw;
  } catch (const std::exception& error) {
    fail_unread(source, layout, error);
  }
  for (size_t i = 0; i < layout.count; ++i) views[i] = {base + layout.offset[i], layout.bytes[i]};
  parts = layout.count;
  return message.credit;
}

void Channel::take_credit(int source, uint32_t low_bits) {
  // Only the low bits of the count travel; it never moves by more than the slots.
  const auto step = static_cast<int32_t>(low_bits - static_cast<uint32_t>(credit_[source]));
  if (step <= 0) return;
  const uint64_t credit = credit_[source] + static_cast<uint64_t>(step);
  if (credit > posted_) fail_credit(source, credit);
  credit_[source] = credit;
}

void Channel::await_message(int source, End& end) {
  const uint64_t sequence = completed_;
  Clock::duration elapsed{};
  const bool done = wait_until(
      *transport_, policy_, begun(end), kLivenessSlice, elapsed,
      [&] {
        if (polled_) transport_->progress();
        return arrived(source, *next_wait_, sequence);
      },
      [&](bool slow) {
        check_running();
        if (!slow) return;
        check_interrupt(end);
        check_all_alive(sequence);
      });
  stats_.wait_seconds[source] += std::chrono::duration<double>(elapsed).count();
  if (done) return;
  const std::vector<channel_errors::Missing> missing = missing_peers(sequence);
  const auto is_source = [source](const channel_errors::Missing& peer) {
    return peer.first == source;
  };
  const bool blamed = missing.empty() || std::ranges::any_of(missing, is_source);
  const ChannelError error =
      channel_errors::not_sent(at(sequence), blamed ? source : missing.front().first, missing);
  if (poisoned()) raise_poison();  // another rank was first, perhaps while this one asked
  fail(error);
}

void Channel::record_lag(int source) {
  // How many iterations this rank is ahead of `source`: it sent `posted_`, that one sent `theirs`.
  uint64_t theirs = posted_;
  auto round = next_post_;
  for (; config_.bound > 0 && theirs > completed_; --theirs) {
    if (round == rounds_.begin()) round = rounds_.end();
    --round;
    if (arrived(source, *round, theirs - 1)) break;
  }
  const uint64_t lag = theirs >= posted_ ? 0 : posted_ - 1 - theirs;
  ++stats_.lag_histogram[lag];
}

void Channel::release() {
  if (gate_.shut()) [[unlikely]]
    raise_closed();
  if (released_ == completed_) refuse(channel_errors::nothing_completed);
  ++released_;
  // The next message to each peer tells it.
  if (credit_word_needed_) return_credits();
}

void Channel::return_credits() {
  const CallGuard guard(*this);
  try {
    for (int source = 0; source < config_.world_size; ++source) {
      if (source != config_.rank) transport_->return_credit(source, released_);
    }
  } catch (const Interruption& interruption) {
    poison(interruption.what());
    throw;
  }
}

}  // namespace bls
