#include "channel/channel.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "host/limits.h"

namespace bls {
namespace {

// A dead peer wakes nobody: a sleeping rank looks for itself this often.
constexpr std::chrono::milliseconds kLivenessSlice{20};
// Credits are returned without waking their receiver, which hardly ever waits for one.
constexpr std::chrono::microseconds kCreditSlice{200};

// A process that ends loses its memory a moment before it counts as dead.
constexpr std::chrono::milliseconds kDying{500};

constexpr const char* kCausesDelay = " causes this; raise the deadline if it is only slow";
constexpr const char* kCauseOfDamage =
    ". Two versions of torchrec-bls, or a write out of bounds in one of the two processes, cause "
    "this";

std::string seconds(Clock::duration duration) {
  return std::to_string(std::chrono::duration<double>(duration).count()) + " s";
}

/// Writes a part between `at` and `end`. Returns its bytes and moves `at` to its first one, or
/// returns SIZE_MAX if it does not fit.
[[gnu::noinline]] size_t put_blocks(std::byte* base, size_t& at, size_t end, const Part& part) {
  const size_t first = align_part(at, bytes_of(part));
  if (first > end) return SIZE_MAX;
  const size_t bytes = copy_blocks(base + first, end - first, part);
  if (bytes > end - first) return SIZE_MAX;
  const size_t start = align_part(at, bytes);
  if (start != first) [[unlikely]] {  // its writer has made a cache line of it
    if (start + bytes > end) return SIZE_MAX;
    std::memmove(base + start, base + first, bytes);
  }
  at = start;
  return bytes;
}

/// Writes all parts from 0 to `end`. Returns whether they fit; what stands in `layout` then is
/// where they are.
bool put_parts(std::byte* base, size_t end, const Message& message, PartLayout& layout) {
  layout.count = message.size();
  size_t at = 0;
  for (size_t i = 0; i < layout.count; ++i) {
    layout.bytes[i] = put_blocks(base, at, end, message[i]);
    if (layout.bytes[i] == SIZE_MAX) return false;
    layout.offset[i] = at;
    at += layout.bytes[i];
  }
  layout.end = at;
  return true;
}

PartLayout layout_of(const Message& message, uint64_t start) {
  PartLayout layout;
  layout.count = message.size();
  for (size_t i = 0; i < layout.count; ++i) layout.bytes[i] = measure(message[i]);
  layout.place(start);
  return layout;
}

/// Writes all parts to `bytes`, which they were measured to take.
void put_measured(std::byte* base, size_t bytes, const Message& message, PartLayout& layout) {
  if (!put_parts(base, bytes, message, layout)) {
    throw std::logic_error("a part takes more bytes than it was measured to");
  }
}

}  // namespace

/// Marks this rank as inside post, wait or release, so that `close` from another thread can let it
/// leave before memory goes away. The fence that this needs is on the side of `close`.
class Channel::CallGuard {
 public:
  explicit CallGuard(Channel& channel) : channel_(channel) {
    channel_.in_call_.store(true, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (channel_.closing_.load(std::memory_order_relaxed)) [[unlikely]]
      refuse();
  }
  ~CallGuard() { channel_.in_call_.store(false, std::memory_order_release); }
  CallGuard(const CallGuard&) = delete;
  CallGuard& operator=(const CallGuard&) = delete;

 private:
  [[noreturn, gnu::cold]] void refuse() {
    channel_.in_call_.store(false, std::memory_order_release);
    channel_.raise_closed();
  }

  Channel& channel_;
};

Channel::Channel(std::unique_ptr<Transport> transport, const ChannelConfig& config)
    : transport_(std::move(transport)),
      config_(config),
      policy_(policy_for(config.local_ranks, usable_cpus())),
      slot_bytes_(transport_->slot_bytes()),
      polled_(transport_->polled()),
      poisoned_(transport_->poisoned()),
      credit_word_needed_(config.slots < 2 * (config.bound + 1)) {
  if (config_.slots < config_.bound + 1) {
    throw std::invalid_argument("bound " + std::to_string(config_.bound) + " needs at least " +
                                std::to_string(config_.bound + 1) + " slots, not " +
                                std::to_string(config_.slots));
  }
  if (config_.interrupt) transport_->use_interrupt([this] { ask_interrupt(); });
  syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
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
  next_post_->batch = batch_;
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
  const std::string channel = "channel '" + config_.name + "'";
  if (messages.size() != static_cast<size_t>(config_.world_size)) {
    throw std::invalid_argument(
        channel + ": a post has one message per rank: " + std::to_string(config_.world_size) +
        ", not " + std::to_string(messages.size()));
  }
  if (posted_ - released_ > config_.bound) {
    throw std::invalid_argument(
        channel + " on rank " + std::to_string(config_.rank) + " has bound " +
        std::to_string(config_.bound) + " and " + std::to_string(posted_ - released_) +
        " posts that are not released: wait for and release the oldest before the next post");
  }
  size_t parts = 0;
  for (const Message& message : messages) parts = std::max(parts, message.size());
  throw std::invalid_argument(channel + ": a message has " + std::to_string(parts) +
                              " parts, at most " + std::to_string(kMaxParts) + " are possible");
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
      bytes = put_blocks(slot, start, slot_bytes_, part);
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
               batch_);
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
               static_cast<uint32_t>(released_), batch_);
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
    fail(error.kind(), describe(destination, posted_) + "cannot get a message: " + error.what());
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
    fail(ErrorKind::kTimeout, describe(destination, posted_) + "did not read " +
                                  std::to_string(posted_ - credit_[destination]) +
                                  " earlier messages within " + seconds(config_.deadline) +
                                  ". A rank that is stuck, stopped or releases nothing" +
                                  kCausesDelay);
  }
}

const Arrival& Channel::wait() {
  const CallGuard guard(*this);
  if (completed_ == posted_) refuse("has no post to wait for: call post first");
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
  if (completed_ == posted_) refuse("has no post to wait for: call post first");
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
  if (pair.pulled_for != 0 || !parse_in_slot(pair.inbox, source, slot_bytes_, next_wait_->batch,
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
    parse_message(pair.inbox, {config_.rank, source, completed_, slot_bytes_}, message);
  } catch (const ChannelError& error) {
    fail_damaged(source, error);
  }
  if (message.batch != next_wait_->batch) fail_other_batch(source, message.batch);
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

void Channel::fail_credit(int source, uint64_t credit) {
  fail(ErrorKind::kProtocol, describe(source, completed_) + "says it read " +
                                 std::to_string(credit) + " of " + std::to_string(posted_) +
                                 " messages" + kCauseOfDamage);
}

/// What comes from below this class knows neither the channel nor the lag.
void Channel::fail_damaged(int source, const std::exception& error) {
  fail(ErrorKind::kProtocol, describe(source, completed_) +
                                 "sent a message that cannot be right: " + error.what() +
                                 kCauseOfDamage);
}

void Channel::fail_other_batch(int source, uint32_t theirs) {
  fail(ErrorKind::kProtocol,
       describe(source, completed_) + "sent what belongs to batch " + std::to_string(theirs) +
           ", but this rank waits for batch " + std::to_string(next_wait_->batch) +
           ": one of the two left out an exchange, as an interrupted forward or backward does. "
           "Start the ranks again");
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
  std::string cure;
  if (kind == ErrorKind::kTimeout) {
    cure = std::string(". A rank that is stuck or stopped") + kCausesDelay;
  } else if (kind == ErrorKind::kTransport) {
    cure = ". Look at that rank's own output, then at the network";
  }
  const uint64_t slot_bytes = align_part(header_bytes(layout.count), 64) + layout.end;
  fail(kind, describe(source, completed_) + "sent a message that cannot be read: " + error.what() +
                 cure + ". With slot_bytes=" + std::to_string(slot_bytes) +
                 " it would stand in its slot");
}

Clock::time_point Channel::begun(End& end) const {
  if (!end) end = Clock::now() + config_.deadline;
  return *end;
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
  const std::vector<int> missing = missing_peers(sequence);
  const bool blamed = missing.empty() || std::ranges::count(missing, source) > 0;
  const std::string message =
      describe(blamed ? source : missing.front(), sequence) + "did not send within " +
      seconds(config_.deadline) + ". Missing: " + list(missing) +
      ". A rank that is stuck, stopped or ran fewer iterations" + kCausesDelay;
  if (poisoned()) raise_poison();  // another rank was first, perhaps while this one asked
  fail(ErrorKind::kTimeout, message);
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
  if (closing_.load(std::memory_order_relaxed)) [[unlikely]]
    raise_closed();
  if (released_ == completed_) refuse("has nothing to release: wait for it first");
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

ChannelStats Channel::stats() const {
  ChannelStats stats = stats_;
  stats.messages = posted_ * static_cast<uint64_t>(config_.world_size - 1);
  return stats;
}

void Channel::refuse(const char* what) const {
  throw std::invalid_argument("channel '" + config_.name + "' on rank " +
                              std::to_string(config_.rank) + " " + what);
}

void Channel::poison(const std::string& reason) {
  // A channel that was closed meanwhile is left as it is: what it posted may still be on its way.
  if (abandoned_ || closing_) return;
  transport_->poison_all(here(completed_) + ": " + reason);
}

void Channel::abandon() {
  if (abandoned_) return;  // in a child of a child, whose descriptors may be other ones by now
  abandoned_ = true;
  closing_ = true;
  transport_->abandon();
}

void Channel::close() {
  if (closing_.exchange(true)) return;
  // Makes every thread of this process see `closing_` or this thread see its `in_call_`.
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // store buffers are long empty
  }
  transport_->wake_self();
  while (in_call_.load()) sched_yield();
  try {
    End end;
    begun(end);
    // First, so that peers which close as well do not wait for this rank to read what they sent.
    transport_->announce_close();
    await_readers(end);
  } catch (const Interruption& interruption) {
    transport_->poison_all(here(completed_) + ": " + interruption.what());
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
      std::this_thread::sleep_for(kCreditSlice);
    }
  }
}

void Channel::check_interrupt(const End& end) {
  if (!config_.interrupt) return;
  if (Clock::now() >= *end - config_.deadline + kBeforeInterrupt) ask_interrupt();
}

void Channel::ask_interrupt() {
  // What is asked may close the channel, and must not wait for this very call to end.
  const bool in_call = in_call_.exchange(false);
  try {
    config_.interrupt();
  } catch (const Interruption& interruption) {
    // What has arrived is not read, and this rank may not come back for it.
    poison(interruption.what());
    throw;
  }
  if (!in_call) return;
  in_call_.store(true);
  check_running();
}

void Channel::check_running() {
  if (closing_.load(std::memory_order_relaxed)) {
    throw ChannelError(
        ErrorKind::kClosed,
        here(completed_) +
            ": another thread or a signal's handler closed the channel during a wait");
  }
  if (poisoned()) raise_poison();
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

void Channel::fail_gone(int peer, PeerState state, uint64_t sequence, const char* doing) {
  // A peer that went because of a failure, its own or another rank's, has told of it before. Where
  // poison comes by two ways it may not have been taken over yet.
  transport_->progress();
  if (poisoned()) raise_poison();
  const std::string fault = transport_->peer_fault(peer);
  if (state == PeerState::kFailed || (state == PeerState::kDead && !fault.empty())) {
    fail(state == PeerState::kDead ? ErrorKind::kPeerDied : ErrorKind::kTransport,
         describe(peer, sequence) + "is lost, and this rank waited for it " + doing + ": " + fault);
  }
  if (state == PeerState::kDead) {
    fail(ErrorKind::kPeerDied, describe(peer, sequence) + "died while this rank waited for it " +
                                   doing + ": look at that rank's own output for the cause");
  }
  fail(ErrorKind::kPeerClosed, describe(peer, sequence) +
                                   "closed the channel while this rank waited for it " + doing +
                                   ": all ranks must run the same number of iterations");
}

void Channel::fail_overwritten(int source, uint64_t found, uint64_t sequence) {
  fail(ErrorKind::kProtocol, describe(source, sequence) + "wrote sequence " +
                                 std::to_string(found) + " into the slot of " +
                                 std::to_string(sequence) + kCauseOfDamage);
}

void Channel::fail(ErrorKind kind, const std::string& message) {
  transport_->poison_all(message);
  throw ChannelError(kind, message);
}

void Channel::raise_poison() {
  // Before this rank can close: nobody may take it for the one that failed.
  transport_->pass_poison_on();
  const Poison poison = transport_->poison();
  throw ChannelError(ErrorKind::kPoisoned, here(completed_) + ": stopped because rank " +
                                               std::to_string(poison.origin) +
                                               " failed: " + poison.message);
}

void Channel::raise_closed() {
  const std::string channel =
      "channel '" + config_.name + "' on rank " + std::to_string(config_.rank);
  if (abandoned_) {
    throw ChannelError(ErrorKind::kClosed,
                       channel +
                           " belongs to the process that made it: a forked child is no rank of it. "
                           "Fork before the channel is made, or do not use it in the child");
  }
  throw ChannelError(ErrorKind::kClosed, channel + " is closed");
}

std::string Channel::here(uint64_t sequence) const {
  return "channel '" + config_.name + "' on rank " + std::to_string(config_.rank) + ", sequence " +
         std::to_string(sequence) + ", lag " +
         std::to_string(posted_ > completed_ ? posted_ - 1 - completed_ : 0);
}

std::string Channel::describe(int peer, uint64_t sequence) const {
  return here(sequence) + ": rank " + std::to_string(peer) + " ";
}

/// The peers that have not sent: not those whose message is late because of another's.
std::vector<int> Channel::missing_peers(uint64_t sequence) {
  std::vector<int> peers;
  for (int peer = 0; peer < config_.world_size; ++peer) {
    if (peer == config_.rank || arrived(peer, round_of(sequence), sequence)) continue;
    if (!transport_->on_its_way(peer, sequence)) peers.push_back(peer);
  }
  return peers;
}

std::string Channel::list(const std::vector<int>& peers) {
  std::string list;
  for (const int peer : peers) {
    if (!list.empty()) list += ", ";
    list += "rank " + std::to_string(peer);
    const PeerState state = transport_->peer_state(peer);
    if (state == PeerState::kDead) list += " (dead)";
    if (state == PeerState::kFailed) list += " (lost)";
    if (state == PeerState::kClosed) list += " (closed)";
  }
  return list;
}

}  // namespace bls
