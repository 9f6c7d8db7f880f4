#include <array>
#include <cstring>

#include "transport/verbs/verbs_transport.h"

namespace bls {

Poison VerbsTransport::poison() const {
  const std::lock_guard lock(mutex_);
  latch_poison();
  return poison_.value_or(Poison{});
}

/// Later poison overwrites the word, but not what this rank has read.
void VerbsTransport::latch_poison() const {
  const auto sender = static_cast<int32_t>(poisoned().load(std::memory_order_acquire)) - 1;
  if (poison_ || sender == -1) return;
  if (sender < 0 || sender >= shape_.world_size || !peers_[sender].queue) {
    poison_ = {sender, "its number is damaged"};
    return;
  }
  const PeerBlock& block = block_of(sender);
  const auto origin = static_cast<int32_t>(block.poison_origin) - 1;
  poison_ = {origin < 0 || origin >= shape_.world_size ? sender : origin,
             std::string(block.poison_text, strnlen(block.poison_text, kPoisonText))};
}

void VerbsTransport::poison_all(const std::string& message) {
  std::unique_lock lock(mutex_);
  keep_poison({shape_.rank, message});
  spread_poison(lock);
}

void VerbsTransport::adopt_poison(const Poison& poison) {
  const std::lock_guard lock(mutex_);
  keep_poison(poison);
}

void VerbsTransport::keep_poison(const Poison& poison) {
  latch_poison();
  if (!poison_) poison_ = {poison.origin, poison.message.substr(0, kPoisonText - 1)};
  VerbsLayout::poison_word(inbox_.data()).store(static_cast<uint32_t>(shape_.rank) + 1);
}

void VerbsTransport::pass_poison_on() {
  std::unique_lock lock(mutex_);
  latch_poison();
  if (poison_) spread_poison(lock);
}

void VerbsTransport::spread_poison(std::unique_lock<std::mutex>& lock) {
  if (std::exchange(poison_spread_, true)) return;
  drain();
  const uint64_t word = static_cast<uint64_t>(shape_.rank) + 1;
  for (int index = 0; index < shape_.world_size; ++index) {
    const Peer& peer = peers_[index];
    if (!peer.queue || peer.fault || closed(index)) continue;
    PeerBlock& block = VerbsLayout::block(outbox_.data(), peer.place);
    block.poison_origin = static_cast<uint32_t>(poison_->origin) + 1;
    std::memcpy(block.poison_text, poison_->message.data(), poison_->message.size());
    const auto bytes = static_cast<uint32_t>(sizeof(uint32_t) + poison_->message.size() + 1);
    std::array<ibv_sge, 2> pieces{
        {{reinterpret_cast<uintptr_t>(&block.poison_origin), bytes, outbox_.local_key()},
         {reinterpret_cast<uintptr_t>(&word), sizeof(word), 0}}};
    // The text first: whoever sees the word can read it.
    std::array<ibv_send_wr, 2> requests{write_request(index, pieces[0],
                                                      VerbsLayout::block_offset(peer.place_there) +
                                                          offsetof(PeerBlock, poison_origin)),
                                        write_request(index, pieces[1], 0)};
    post(index, requests, kControlTag);
  }
  flush(lock, kPoisonGrace, nullptr);
}

}  // namespace bls
