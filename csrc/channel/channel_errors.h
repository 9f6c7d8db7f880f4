#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "transport/transport.h"

namespace bls {
struct ChannelConfig;
}

/// The errors that a channel raises: each text in one place, with its kind, where it happened and
/// what to do.
namespace bls::channel_errors {

// Mistakes of the caller, which fail nothing.

std::invalid_argument too_few_slots(const ChannelConfig& channel);
std::invalid_argument wrong_message_count(const ChannelConfig& channel, size_t messages);
std::invalid_argument too_many_posts(const ChannelConfig& channel, uint64_t unreleased);
std::invalid_argument too_many_parts(const ChannelConfig& channel, size_t parts);
std::invalid_argument nothing_posted(const ChannelConfig& channel);
std::invalid_argument nothing_completed(const ChannelConfig& channel);

ChannelError closed(const ChannelConfig& channel);
ChannelError forked_child(const ChannelConfig& channel);

// Failures of a run.

/// Where a rank was when it failed.
struct Place {
  const ChannelConfig& channel;
  uint64_t sequence;
  uint64_t lag;
};
/// What every text below begins with, and poison of a rank's own.
std::string text_of(const Place& place);

/// A peer that has not sent, and its state.
using Missing = std::pair<int, PeerState>;

ChannelError closed_meanwhile(const Place& place);
ChannelError poisoned(const Place& place, const Poison& poison);
ChannelError not_sent(const Place& place, int source, const std::vector<Missing>& missing);
ChannelError not_read(const Place& place, int destination, uint64_t messages);
ChannelError no_memory(const Place& place, int destination, const ChannelError& error);
/// `doing` is what the rank waited for the peer to do, `fault` what the transport knows.
ChannelError gone(const Place& place, int peer, PeerState state, const char* doing,
                  const std::string& fault);

ChannelError overwritten(const Place& place, int source, uint64_t found);
ChannelError impossible_credit(const Place& place, int source, uint64_t credit, uint64_t posted);
ChannelError damaged(const Place& place, int source, const std::exception& error);
ChannelError other_call(const Place& place, int source, uint32_t theirs, uint32_t ours);
/// A message outside its slot; with `slot_bytes` it would stand in it.
ChannelError unreadable(const Place& place, int source, ErrorKind kind, const std::exception& error,
                        uint64_t slot_bytes);

}  // namespace bls::channel_errors
