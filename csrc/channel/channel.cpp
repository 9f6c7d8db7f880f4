#include "channel/channel.h"

#include <algorithm>
#include <thread>

#include "host/limits.h"

namespace bls {
namespace {

// A peer that reads a message wakes nobody: a rank that closes looks this often.
constexpr std::chrono::microseconds kReaderSlice{200};

}  // namespace

Channel::Channel(std::unique_ptr<Transport> transport, const ChannelConfig& config)
    : transport_(std::move(transport)),
      config_(config),
      policy_(policy_for(config.local_ranks, usable_cpus())),
      slot_bytes_(transport_->slot_bytes()),
      polled_(transport_->polled()),
      poisoned_(transport_->poisoned()),
      credit_word_needed_(config.slots < 2 * (config.bound + 1)) {
  if (config_.slots < config_.bound + 1) throw channel_errors::too_few_slots(config_);
  if (config_.interrupt) transport_->use_interrupt([this] { ask_interrupt(); });
  const size_t world = static_cast<size_t>(config_.world_size);
  credit_.assign(world, 0);
  rounds_.resize(config_.slots);
  for (uint32_t slot = 0; slot < config_.slots; ++slot) {
    Round& round = rounds_[slot];
    for (int peer = 0; peer < config_.world_size; ++peer) {
      round.pairs.push_back({transport_->outbox(peer, slot), transport_->inbox(peer, slot)});
    }
    round.arrival.views_.resize(world * kMaxParts);
    round.arrival.counts_.assign(world, 0);
    round.arrival.names_ = config_.names;
  }
  next_post_ = next_wait_ = rounds_.begin();
  stats_.wait_seconds.assign(world, 0.0);
  stats_.lag_histogram.assign(config_.bound + 1, 0);
}

Channel::~Channel() {
  try {
    close();
  } catch (...) {  // the peers know, and here is nobody to tell
  }
  // A forked child has none of the memory, and something else may stand at its addresses.
  if (abandoned_) static_cast<void>(transport_.release());
}

ChannelStats Channel::stats() const {
  ChannelStats stats = stats_;
  stats.messages = posted_ * static_cast<uint64_t>(config_.world_size - 1);
  return stats;
}

void Channel::poison(const std::string& reason) {
  // A channel that was closed meanwhile is left as it is: what it posted may still be on its way.
  if (abandoned_ || closed()) return;
  transport_->poison_all(channel_errors::text_of(at(completed_)) + ": " + reason);
}

void Channel::close() {
  if (!gate_.close()) return;
  transport_->wake_self();
  gate_.await_leaving();
  try {
    End end;
    begun(end);
    // First, so that peers which close as well do not wait for this rank to read what they sent.
    transport_->announce_close();
    await_readers(end);
  } catch (const Interruption& interruption) {
    transport_->poison_all(channel_errors::text_of(at(completed_)) + ": " + interruption.what());
    transport_->leave();
    throw;
  }
  // A peer that cannot read a message any more then knows why.
  transport_->pass_poison_on();
  transport_->leave();
}

/// Messages that peers may still have to pull live in this rank's memory.
void Channel::await_readers(const End& end) {
  for (int peer = 0; peer < config_.world_size; ++peer) {
    const auto exposing = [&](const Round& round) { return round.pairs[peer].exposing(); };
    if (std::none_of(rounds_.begin(), rounds_.end(), exposing)) continue;
    while (transport_->credit(peer) < posted_ && !poisoned() && Clock::now() < *end &&
           transport_->still_reads(peer)) {
      check_interrupt(end);
      std::this_thread::sleep_for(kReaderSlice);
    }
  }
}

void Channel::abandon() {
  if (abandoned_) return;  // in a child of a child, whose descriptors may be other ones by now
  abandoned_ = true;
  gate_.close_alone();
  transport_->abandon();
}

}  // namespace bls
