#include "channel/channel_errors.h"

#include <chrono>

#include "channel/call_label.h"
#include "channel/channel.h"

namespace bls::channel_errors {
namespace {

constexpr const char* kUnequalEnds =
    ". torchrec_bls.EndTogether ends all ranks together where their numbers of batches differ";

constexpr const char* kCauseOfDamage =
    ". Two versions of torchrec-bls, or a write out of bounds in one of the two processes, cause "
    "this";

std::string name_of(const ChannelConfig& channel) { return "channel '" + channel.name + "'"; }

std::string name_and_rank(const ChannelConfig& channel) {
  return name_of(channel) + " on " + channel.names.of(channel.rank);
}

std::string about(const Place& place, int peer) {
  return text_of(place) + ": " + place.channel.names.of(peer) + " ";
}

std::string causes_delay(const Place& place) {
  return " causes this; raise " + place.channel.deadline_name + " if it is only slow";
}

std::string deadline_of(const Place& place) {
  const std::chrono::duration<double> seconds = place.channel.deadline;
  return std::to_string(seconds.count()) + " s";
}

std::string list(const RankNames& names, const std::vector<Missing>& peers) {
  std::string list;
  for (const auto& [peer, state] : peers) {
    if (!list.empty()) list += ", ";
    list += names.of(peer);
    if (state == PeerState::kDead) list += " (dead)";
    if (state == PeerState::kFailed) list += " (lost)";
    if (state == PeerState::kClosed) list += " (closed)";
  }
  return list;
}

}  // namespace

std::invalid_argument too_few_slots(const ChannelConfig& channel) {
  return std::invalid_argument("bound " + std::to_string(channel.bound) + " needs at least " +
                               std::to_string(channel.bound + 1) + " slots, not " +
                               std::to_string(channel.slots));
}

std::invalid_argument wrong_message_count(const ChannelConfig& channel, size_t messages) {
  return std::invalid_argument(name_of(channel) + ": a post has one message per rank: " +
                               std::to_string(channel.world_size) + ", not " +
                               std::to_string(messages));
}

std::invalid_argument too_many_posts(const ChannelConfig& channel, uint64_t unreleased) {
  return std::invalid_argument(
      name_and_rank(channel) + " has bound " + std::to_string(channel.bound) + " and " +
      std::to_string(unreleased) +
      " posts that are not released: wait for and release the oldest before the next post");
}

std::invalid_argument too_many_parts(const ChannelConfig& channel, size_t parts) {
  return std::invalid_argument(name_of(channel) + ": a message has " + std::to_string(parts) +
                               " parts, at most " + std::to_string(kMaxParts) + " are possible");
}

std::invalid_argument nothing_posted(const ChannelConfig& channel) {
  return std::invalid_argument(name_and_rank(channel) +
                               " has no post to wait for: call post first");
}

std::invalid_argument nothing_completed(const ChannelConfig& channel) {
  return std::invalid_argument(name_and_rank(channel) +
                               " has nothing to release: wait for it first");
}

ChannelError closed(const ChannelConfig& channel) {
  return {ErrorKind::kClosed, name_and_rank(channel) + " is closed"};
}

ChannelError forked_child(const ChannelConfig& channel) {
  return {ErrorKind::kClosed,
          name_and_rank(channel) +
              " belongs to the process that made it: a forked child is no rank of it. "
              "Fork before the channel is made, or do not use it in the child"};
}

std::string text_of(const Place& place) {
  return name_and_rank(place.channel) + ", sequence " + std::to_string(place.sequence) + ", lag " +
         std::to_string(place.lag);
}

ChannelError closed_meanwhile(const Place& place) {
  return {
      ErrorKind::kClosed,
      text_of(place) + ": another thread or a signal's handler closed the channel during a wait"};
}

ChannelError poisoned(const Place& place, const Poison& poison) {
  return {ErrorKind::kPoisoned, text_of(place) + ": stopped because " +
                                    place.channel.names.of(poison.origin) +
                                    " failed: " + poison.message};
}

ChannelError not_sent(const Place& place, int source, const std::vector<Missing>& missing) {
  return {ErrorKind::kTimeout, about(place, source) + "did not send within " + deadline_of(place) +
                                   ". Missing: " + list(place.channel.names, missing) +
                                   ". A rank that is stuck, stopped or ran fewer iterations" +
                                   causes_delay(place) + kUnequalEnds};
}

ChannelError not_read(const Place& place, int destination, uint64_t messages) {
  return {ErrorKind::kTimeout,
          about(place, destination) + "did not read " + std::to_string(messages) +
              " earlier messages within " + deadline_of(place) +
              ". A rank that is stuck, stopped or releases nothing" + causes_delay(place)};
}

ChannelError no_memory(const Place& place, int destination, const ChannelError& error) {
  return {error.kind(), about(place, destination) + "cannot get a message: " + error.what()};
}

ChannelError gone(const Place& place, int peer, PeerState state, const char* doing,
                  const std::string& fault) {
  const std::string who = about(place, peer);
  const std::string waited = std::string(" this rank waited for it ") + doing + ": ";
  const ErrorKind kind = state == PeerState::kDead ? ErrorKind::kPeerDied : ErrorKind::kTransport;
  if (state == PeerState::kFailed || (state == PeerState::kDead && !fault.empty())) {
    return {kind, who + "is lost, and" + waited + fault};
  }
  if (state == PeerState::kDead) {
    return {kind, who + "died while" + waited + "look at that rank's own output for the cause"};
  }
  return {ErrorKind::kPeerClosed, who + "closed the channel while" + waited +
                                      "all ranks must run the same number of iterations" +
                                      kUnequalEnds};
}

ChannelError overwritten(const Place& place, int source, uint64_t found) {
  return {ErrorKind::kProtocol, about(place, source) + "wrote sequence " + std::to_string(found) +
                                    " into the slot of " + std::to_string(place.sequence) +
                                    kCauseOfDamage};
}

ChannelError impossible_credit(const Place& place, int source, uint64_t credit, uint64_t posted) {
  return {ErrorKind::kProtocol, about(place, source) + "says it read " + std::to_string(credit) +
                                    " of " + std::to_string(posted) + " messages" + kCauseOfDamage};
}

ChannelError damaged(const Place& place, int source, const std::exception& error) {
  return {ErrorKind::kProtocol, about(place, source) + "sent a message that cannot be right: " +
                                    error.what() + kCauseOfDamage};
}

ChannelError other_call(const Place& place, int source, uint32_t theirs, uint32_t ours) {
  return {ErrorKind::kProtocol,
          about(place, source) + "sent what belongs to " + text_of_call(theirs) +
              ", but this rank waits for " + text_of_call(ours) +
              ": one of the two left out an exchange, as an interrupted forward or backward does. "
              "Start the ranks again"};
}

ChannelError unreadable(const Place& place, int source, ErrorKind kind, const std::exception& error,
                        uint64_t slot_bytes) {
  std::string cure;
  if (kind == ErrorKind::kTimeout) {
    cure = ". A rank that is stuck or stopped" + causes_delay(place);
  } else if (kind == ErrorKind::kTransport) {
    cure = ". Look at that rank's own output, then at the network";
  }
  return {kind, about(place, source) + "sent a message that cannot be read: " + error.what() +
                    cure + ". With slot_bytes=" + std::to_string(slot_bytes) +
                    " it would stand in its slot"};
}

}  // namespace bls::channel_errors
