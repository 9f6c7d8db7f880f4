#include "transport/two_sided/two_sided_transport.h"

#include "errors.h"

namespace bls {
namespace {

/// A peer that runs answers within this time, whatever its own thread is doing.
constexpr std::chrono::milliseconds kTimeToAnswer{300};
constexpr std::chrono::milliseconds kBetweenQuestions{2};

}  // namespace

void TwoSidedTransport::deliver(int destination, std::byte* message, size_t bytes,
                                uint64_t sequence) {
  const RingShape& shape = outboxes_.shape;
  // Travels with the message, which has arrived when its receiver says so.
  arrival_word(message).store(0, std::memory_order_relaxed);
  bytes_[static_cast<size_t>(destination)] = bytes;
  if (++delivered_ < shape.world_size - 1) return;
  delivered_ = 0;
  posted_ = sequence + 1;
  const auto slot = static_cast<uint32_t>(sequence % shape.slots);
  messenger_->exchange(slot, sequence, bytes_);
}

void TwoSidedTransport::return_credit(int source, uint64_t consumed) {
  messenger_->return_credit(source, consumed);
}

uint64_t TwoSidedTransport::ended(int peer) {
  Clock::time_point& ask_again = ask_again_[static_cast<size_t>(peer)];
  const auto now = Clock::now();
  if (now >= ask_again && inbox_->still_reads(peer)) {
    ask_again = now + kBetweenQuestions;
    messenger_->ask_for_end(peer);
  }
  return inbox_->ended_by(peer);
}

std::byte* TwoSidedTransport::expose(int destination, uint32_t slot, size_t bytes,
                                     MemoryAddress& address) {
  address = {{}, bytes};
  return messenger_->expose(destination, slot, bytes);
}

const std::byte* TwoSidedTransport::pull(int source, uint32_t slot, const MemoryAddress& address,
                                         size_t bytes) {
  // A receive of another size than what is sent would break the connection.
  if (address.bytes != bytes) {
    throw ChannelError(ErrorKind::kProtocol, "its parts take " + std::to_string(bytes) +
                                                 " bytes, and it announces " +
                                                 std::to_string(address.bytes));
  }
  return messenger_->pull(source, slot, bytes);
}

void TwoSidedTransport::poison_all(const std::string& message) {
  inbox_->poison(outboxes_.shape.rank, message);
  pass_poison_on();
}

void TwoSidedTransport::pass_poison_on() {
  if (poisoned().load() == 0 || poison_spread_.exchange(true)) return;
  const Poison poison = this->poison();
  messenger_->spread_poison(poison.origin, poison.message);
}

bool TwoSidedTransport::on_its_way(int source, uint64_t sequence) {
  if (asked_for_ != sequence + 1) {
    asked_for_ = sequence + 1;
    for (int peer = 0; peer < outboxes_.shape.world_size; ++peer) {
      if (peer != outboxes_.shape.rank) messenger_->ask(peer);
    }
    answers_until_ = Clock::now() + kTimeToAnswer;
  }
  return inbox_->has_posted(source, sequence, answers_until_);
}

}  // namespace bls
