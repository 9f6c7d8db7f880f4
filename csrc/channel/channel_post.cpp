#include <algorithm>
#include <cstring>

#include "channel/channel.h"

namespace bls {
namespace {

// Credits are returned without waking their receiver, which hardly ever waits for one.
constexpr std::chrono::microseconds kCreditSlice{200};

}  // namespace

uint64_t Channel::post(std::span<const Message> messages) {
  const CallGuard guard(*this);
  if (polled_) transport_->progress();
  if (poisoned()) raise_poison();
  if (messages.size() != static_cast<size_t>(config_.world_size) ||
      posted_ - released_ > config_.bound) {
    refuse_post(messages);
  }
  for (const Message& message : messages) {
    if (message.size() > kMaxParts) refuse_post(messages);
  }
  Arrival& arrival = next_post_->arrival;
  arrival.sequence_ = posted_;
  next_post_->label = label_;
  arrival.counts_[config_.rank] = messages[config_.rank].size();
  End end;
  try {
    if (!messages[config_.rank].empty()) keep_own(messages[config_.rank], arrival);
    for (int step = 1; step < config_.world_size; ++step) {
      // Each rank starts with its successor, so that nobody is everybody's first.
      int destination = config_.rank + step;
      if (destination >= config_.world_size) destination -= config_.world_size;
      send(destination, messages[destination], end);
    }
  } catch (const std::exception& error) {
    // Some peers have their message and some never will.
    poison(error.what());
    throw;
  }
  advance(next_post_);
  return posted_++;
}

void Channel::refuse_post(std::span<const Message> messages) const {
  if (messages.size() != static_cast<size_t>(config_.world_size)) {
    throw channel_errors::wrong_message_count(config_, messages.size());
  }
  const uint64_t unreleased = posted_ - released_;
  if (unreleased > config_.bound) throw channel_errors::too_many_posts(config_, unreleased);
  size_t parts = 0;
  for (const Message& message : messages) parts = std::max(parts, message.size());
  throw channel_errors::too_many_parts(config_, parts);
}

void Channel::keep_own(const Message& message, Arrival& arrival) {
  View* views = arrival.views_.data() + static_cast<size_t>(config_.rank) * kMaxParts;
  const bool in_place = std::all_of(message.begin(), message.end(), [](const Part& part) {
    return part.empty() || only_run(part) != nullptr;
  });
  if (in_place) {
    for (const Part& part : message) {
      *views++ = {part.empty() ? nullptr : part[0].data, bytes_of(part)};
    }
    return;
  }
  PartLayout layout;
  std::vector<std::byte>& own = arrival.own_;
  if (!put_parts(own.data(), own.size(), message, layout)) {
    own.resize(layout_of(message, 0).end);
    put_measured(own.data(), own.size(), message, layout);
  }
  for (size_t i = 0; i < layout.count; ++i) {
    views[i] = {own.data() + layout.offset[i], layout.bytes[i]};
  }
}

void Channel::send(int destination, const Message& message, End& end) {
  if (posted_ >= credit_[destination] + config_.slots) [[unlikely]]
    await_credit(destination, end);
  PairSlot& pair = next_post_->pairs[destination];
  if (polled_) [[unlikely]]
    pair.outbox = transport_->outbox(destination, slot_of(*next_post_));
  size_t bytes = put_in_slot(pair.outbox, message);
  if (bytes > slot_bytes_) [[unlikely]] {
    bytes = put_pulled(destination, pair.outbox, message);
  } else if (pair.exposed_for != 0) [[unlikely]] {
    age_exposed(destination);
  }
  transport_->deliver(destination, pair.outbox, bytes, posted_);
  // Behind the delivery, where the peer does not wait for it.
  if (bytes > stats_.largest_message) [[unlikely]]
    stats_.largest_message = bytes;
}

/// Returns the bytes that the message takes in a slot; when these are more than a slot has, the
/// message is not there.
size_t Channel::put_in_slot(std::byte* slot, const Message& message) {
  size_t at = header_bytes(message.size());
  std::byte* length = slot + header_bytes(0);
  size_t payload = 0;
  for (const Part& part : message) {
    const Block* const run = only_run(part);
    size_t bytes;
    if (run == nullptr) {
      size_t start = at;  // so that `at` itself may stay in a register
      bytes = put_part(slot, start, slot_bytes_, part);
      if (bytes == SIZE_MAX) [[unlikely]]
        return SIZE_MAX;
      at = start;
    } else {
      bytes = run->bytes();
      at = align_part(at, bytes);
      if (bytes > slot_bytes_ || at + bytes > slot_bytes_) [[unlikely]]
        return SIZE_MAX;
      if (bytes != 0) copy_bytes(slot + at, run->data, bytes);
    }
    at += bytes;
    payload += bytes;
    std::memcpy(length, &bytes, sizeof(bytes));
    length += sizeof(bytes);
  }
  stats_.bytes += payload;
  write_header(slot, header_kind(config_.rank, 0, message.size()), static_cast<uint32_t>(released_),
               label_);
  return at;
}

/// Returns the bytes of the slot that are in use.
size_t Channel::put_pulled(int destination, std::byte* slot, const Message& message) {
  PartLayout layout = layout_of(message, header_bytes(message.size()));
  stats_.largest_message = std::max(stats_.largest_message, layout.end);
  layout.place(0);
  MemoryAddress address;
  put_measured(expose(destination, layout.end, address), layout.end, message, layout);
  std::memcpy(slot + header_bytes(layout.count), &address, sizeof(address));
  std::memcpy(slot + header_bytes(0), layout.bytes.data(), layout.count * sizeof(uint64_t));
  write_header(slot, header_kind(config_.rank, kFlagPulled, layout.count),
               static_cast<uint32_t>(released_), label_);
  next_post_->pairs[destination].exposed_for = kKeepPulled;
  for (size_t i = 0; i < layout.count; ++i) stats_.bytes += layout.bytes[i];
  ++stats_.pulled_messages;
  return header_bytes(layout.count) + sizeof(address);
}

void Channel::age_exposed(int destination) {
  if (--next_post_->pairs[destination].exposed_for == 0) {
    transport_->retract(destination, slot_of(*next_post_));
  }
}

std::byte* Channel::expose(int destination, size_t bytes, MemoryAddress& address) {
  try {
    return transport_->expose(destination, slot_of(*next_post_), bytes, address);
  } catch (const ChannelError& error) {
    fail(channel_errors::no_memory(at(posted_), destination, error));
  }
}

void Channel::await_credit(int destination, End& end) {
  Clock::duration elapsed{};
  const auto have_credit = [&] {
    if (polled_) transport_->progress();
    credit_[destination] = std::max(credit_[destination], transport_->credit(destination));
    return posted_ < credit_[destination] + config_.slots;
  };
  if (have_credit() || spin_until(policy_, have_credit)) return;
  const bool done = wait_until(*transport_, policy_, begun(end), kCreditSlice, elapsed, have_credit,
                               [&](bool slow) {
                                 check_running();
                                 if (!slow) return;
                                 check_interrupt(end);
                                 check_alive(destination, posted_, "to free a slot");
                               });
  stats_.wait_seconds[destination] += std::chrono::duration<double>(elapsed).count();
  if (!done) {
    fail(channel_errors::not_read(at(posted_), destination, posted_ - credit_[destination]));
  }
}

}  // namespace bls
