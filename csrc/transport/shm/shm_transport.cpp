#include "transport/shm/shm_transport.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

#include "errors.h"

namespace bls {
namespace {

constexpr size_t kPoisonText = 1024;
constexpr std::chrono::milliseconds kSleepWithoutFence{1};

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, Clock::duration timeout) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout).count();
  const timespec relative{static_cast<time_t>(ns / 1'000'000'000),
                          static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &relative, nullptr,
          0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Announces a sleep for as long as it lives; `ready` may throw.
class Sleeper {
 public:
  explicit Sleeper(std::atomic<uint32_t>& sleepers) : sleepers_(sleepers) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Sleeper() { sleepers_.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  std::atomic<uint32_t>& sleepers_;
};

}  // namespace

/// Head of every segment. Each field that another rank writes or polls has its own cache line.
struct ShmTransport::ControlBlock {
  alignas(kCacheLine) std::atomic<uint32_t> wake_epoch;
  std::atomic<uint32_t> sleepers;
  alignas(kCacheLine) std::atomic<uint32_t> closed;
  std::atomic<uint64_t> ended;
  alignas(kCacheLine) std::atomic<uint32_t> poisoned;  // the rank that failed + 1, or 0
  int32_t poison_origin;                               // whose failure this rank tells, as it says
  char poison_text[kPoisonText];                       // and why
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

ShmTransport::ShmTransport(const RingShape& shape)
    : shape_(shape),
      slot_stride_(slot_stride(shape.slot_bytes)),
      ring_offset_(align_up(sizeof(ControlBlock) + shape.world_size * kCacheLine, kPage)) {
  const size_t pairs = pair_index(shape.world_size, 0);
  const auto world_size = static_cast<size_t>(shape.world_size);
  own_ = ShmSegment::create(
      ring_offset_ + bls::ring_bytes(world_size, shape.slots, shape.slot_bytes),
      std::to_string(shape.world_size) + " x " + std::to_string(shape.slots) + " slots of " +
          std::to_string(slot_stride_) + " bytes on " + shape.names.of(shape.rank));
  new (own_.data()) ControlBlock{};
  // Before any peer can sleep on this rank's messages; see `sleep`.
  syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0);
  exposed_.resize(pairs);
  pulled_.resize(pairs);
}

ShmTransport::~ShmTransport() {
  for (const int handle : process_handles_) {
    if (handle >= 0) ::close(handle);
  }
}

void ShmTransport::connect(std::span<const SegmentAddress> addresses) {
  peers_.resize(shape_.world_size);
  bases_.resize(shape_.world_size);
  process_handles_.assign(shape_.world_size, -1);
  process_ids_.resize(shape_.world_size);
  for (int peer = 0; peer < shape_.world_size; ++peer) {
    process_ids_[peer] = addresses[peer].pid;
    if (peer == shape_.rank) {
      bases_[peer] = own_.data();
      continue;
    }
    if (addresses[peer].bytes != own_.size()) {
      throw ChannelError(ErrorKind::kProtocol, shape_.names.of(peer) + " announced a segment of " +
                                                   std::to_string(addresses[peer].bytes) +
                                                   " bytes, " + shape_.names.of(shape_.rank) +
                                                   " has " + std::to_string(own_.size()));
    }
    // Before the segment is opened: a process that opens is alive, so the handle is its own.
    process_handles_[peer] = static_cast<int>(syscall(SYS_pidfd_open, addresses[peer].pid, 0));
    try {
      peers_[peer] = ShmSegment::open(addresses[peer]);
    } catch (const ChannelError& error) {
      throw ChannelError(error.kind(), shape_.names.of(peer) + ": " + error.what());
    }
    bases_[peer] = peers_[peer].data();
  }
}

ShmTransport::ControlBlock& ShmTransport::control(int rank) const {
  return *std::launder(reinterpret_cast<ControlBlock*>(bases_[rank]));
}

std::atomic<uint64_t>& ShmTransport::credit_word(int owner, int peer) const {
  return *std::launder(reinterpret_cast<std::atomic<uint64_t>*>(
      bases_[owner] + sizeof(ControlBlock) + static_cast<size_t>(peer) * kCacheLine));
}

void ShmTransport::deliver(int destination, std::byte* slot, size_t, uint64_t sequence) {
  arrival_word(slot).store(sequence + 1, std::memory_order_release);
  // Either the sleeper sees the message or this rank sees the sleeper. The fence between the two
  // lines is the sleeper's: here it would wait until the whole payload has left the store buffer.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  wake(destination);
}

void ShmTransport::wake(int rank) {
  ControlBlock& block = control(rank);
  if (block.sleepers.load(std::memory_order_relaxed) == 0) return;
  block.wake_epoch.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(block.wake_epoch);
}

void ShmTransport::return_credit(int source, uint64_t consumed) {
  credit_word(source, shape_.rank).store(consumed, std::memory_order_release);
}

uint64_t ShmTransport::credit(int destination) {
  return credit_word(shape_.rank, destination).load(std::memory_order_acquire);
}

void ShmTransport::tell_end(uint64_t count) {
  control(shape_.rank).ended.store(count, std::memory_order_release);
}

uint64_t ShmTransport::ended(int peer) {
  return control(peer).ended.load(std::memory_order_acquire);
}

std::byte* ShmTransport::expose(int destination, uint32_t slot, size_t bytes,
                                MemoryAddress& address) {
  ShmSegment& segment = exposed_[pair_index(destination, slot)];
  if (segment.size() < bytes) {
    segment = ShmSegment();
    segment = ShmSegment::create(bytes, "a message of " + shape_.names.of(shape_.rank) + " to " +
                                            shape_.names.of(destination) + " larger than a slot");
  }
  address = std::bit_cast<MemoryAddress>(segment.address());
  return segment.data();
}

void ShmTransport::retract(int destination, uint32_t slot) {
  exposed_[pair_index(destination, slot)] = ShmSegment();
}

const std::byte* ShmTransport::pull(int source, uint32_t slot, const MemoryAddress& memory,
                                    size_t) {
  const auto address = std::bit_cast<SegmentAddress>(memory);
  ShmSegment& segment = pulled_[pair_index(source, slot)];
  const SegmentAddress& known = segment.address();
  if (segment.data() == nullptr || known.inode != address.inode || known.device != address.device ||
      known.bytes != address.bytes) {
    if (address.pid != process_ids_[source]) {
      throw ChannelError(ErrorKind::kProtocol,
                         shape_.names.of(source) + " announced memory of a foreign process");
    }
    segment = ShmSegment();
    segment = ShmSegment::open(address);
  }
  return segment.data();
}

void ShmTransport::drop(int source, uint32_t slot) {
  pulled_[pair_index(source, slot)] = ShmSegment();
}

void ShmTransport::sleep(bool (*ready)(void*), void* context, Clock::time_point until) {
  ControlBlock& block = control(shape_.rank);
  const uint32_t epoch = block.wake_epoch.load(std::memory_order_seq_cst);
  const Sleeper sleeper(block.sleepers);
  const auto now = Clock::now();
  // The other half of the fence in `deliver`, on every core that runs a rank. Without it a message
  // may go unnoticed for one sleep, which is short then.
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) != 0) {
    until = std::min(until, now + kSleepWithoutFence);
  }
  if (!ready(context) && poisoned().load() == 0 && now < until) {
    futex_wait(block.wake_epoch, epoch, until - now);
  }
}

void ShmTransport::wake_self() { wake(shape_.rank); }

const std::atomic<uint32_t>& ShmTransport::poisoned() const {
  return control(shape_.rank).poisoned;
}

Poison ShmTransport::poison() const {
  const auto origin = static_cast<int32_t>(poisoned().load(std::memory_order_acquire)) - 1;
  // A peer wrote the number.
  if (origin < 0 || origin >= shape_.world_size) return {origin, "its number is damaged"};
  const char* const text = control(origin).poison_text;
  return {origin, std::string(text, strnlen(text, kPoisonText))};
}

Poison ShmTransport::told_poison() const {
  Poison told = poison();
  if (told.origin >= 0 && told.origin < shape_.world_size) {
    told.origin = control(told.origin).poison_origin;
  }
  return told;
}

void ShmTransport::tell(const Poison& poison) {
  // The first failure that a rank tells stays: others may be reading the text already.
  if (has_failed_.exchange(true)) return;
  ControlBlock& block = control(shape_.rank);
  block.poison_origin = poison.origin;
  const size_t length = std::min(poison.message.size(), kPoisonText - 1);
  std::memcpy(block.poison_text, poison.message.data(), length);
  block.poison_text[length] = '\0';
  spread_poison(shape_.rank);
}

void ShmTransport::pass_poison_on() {
  const auto origin = static_cast<int32_t>(poisoned().load(std::memory_order_acquire)) - 1;
  if (origin >= 0) spread_poison(origin);
}

void ShmTransport::spread_poison(int origin) {
  for (int peer = 0; peer < shape_.world_size; ++peer) {
    uint32_t none = 0;
    if (control(peer).poisoned.compare_exchange_strong(none, static_cast<uint32_t>(origin) + 1)) {
      wake(peer);
    }
  }
}

PeerState ShmTransport::peer_state(int peer) {
  if (control(peer).closed.load(std::memory_order_acquire) != 0) return PeerState::kClosed;
  if (peer == shape_.rank) return PeerState::kOpen;
  const int handle = process_handles_[peer];
  if (handle >= 0) {
    pollfd exited{handle, POLLIN, 0};
    if (::poll(&exited, 1, 0) == 1) return PeerState::kDead;
  } else if (kill(process_ids_[peer], 0) != 0 && errno == ESRCH) {
    return PeerState::kDead;
  }
  return PeerState::kOpen;
}

void ShmTransport::announce_close() {
  control(shape_.rank).closed.store(1, std::memory_order_release);
  for (int peer = 0; peer < shape_.world_size; ++peer) {
    if (peer != shape_.rank) wake(peer);
  }
}

void ShmTransport::abandon() {
  own_.close_descriptor();
  for (ShmSegment& segment : exposed_) segment.close_descriptor();
  for (int& handle : process_handles_) {
    if (handle >= 0) ::close(std::exchange(handle, -1));
  }
}

}  // namespace bls
