#include "channel/channel.h"

namespace bls {

void Channel::tell_end(uint64_t forwards) {
  if (closed()) return;
  const CallGuard guard(*this);
  transport_->tell_end(forwards);
}

std::optional<uint32_t> Channel::called(uint64_t forwards) {
  const CallGuard guard(*this);
  transport_->progress();
  check_running();
  for (int peer = 0; peer < config_.world_size; ++peer) {
    if (peer != config_.rank && arrived(peer, *next_post_, posted_)) return label_of_next(peer);
  }
  for (int peer = 0; peer < config_.world_size; ++peer) {
    const PeerState state = transport_->peer_state(peer);
    // Asked afterwards: a peer tells its end before it closes.
    if (state == PeerState::kOpen || transport_->ended(peer) >= forwards) continue;
    if (arrived(peer, *next_post_, posted_)) return label_of_next(peer);
    fail_gone(peer, state, posted_, "to end its forward");
  }
  return std::nullopt;
}

uint32_t Channel::label_of_next(int source) {
  ParsedMessage message;
  try {
    parse_message(next_post_->pairs[source].inbox, {source, slot_bytes_}, message);
  } catch (const ChannelError& error) {
    fail_damaged(source, error);
  }
  return message.label;
}

std::vector<int> Channel::not_ended(uint64_t forwards) {
  const CallGuard guard(*this);
  transport_->progress();
  std::vector<int> peers;
  for (int peer = 0; peer < config_.world_size; ++peer) {
    if (peer != config_.rank && transport_->ended(peer) < forwards) peers.push_back(peer);
  }
  return peers;
}

}  // namespace bls
