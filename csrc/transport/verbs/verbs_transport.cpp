#include "transport/verbs/verbs_transport.h"

#include <arpa/inet.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include "errors.h"
#include "transport/verbs/device/verbs_status.h"

namespace bls {
namespace {

constexpr size_t kArrivalWord = sizeof(uint64_t);
/// Besides messages and credits, a send queue holds the end of the channel, a poison of two
/// requests, a read and a probe at most.
constexpr uint32_t kControlRequests = 5;
/// How long telling others of a failure may take.
constexpr std::chrono::milliseconds kPoisonGrace{200};
/// A peer of which nothing was heard for so long is written to, to see whether it answers.
constexpr std::chrono::seconds kSilence{1};

// Tags of chains; a message has that of its slot, counted from kFirstSlotTag on.
constexpr uint64_t kControlTag = 0;
constexpr uint64_t kReadTag = 1;
constexpr uint64_t kFirstSlotTag = 2;

constexpr const char* kKernelLog = ". Look at the kernel log (dmesg)";

/// Packets of an earlier connection with the same numbers are told from those of this one by it.
uint32_t random_packet_number() { return std::random_device{}() & 0xFFFFFF; }

/// Places in the inbox region of `rank`: one for each that it connects to and one for itself.
uint32_t places_of(const VerbsAddress& rank) {
  const auto none = std::count(rank.queue_pairs.begin(), rank.queue_pairs.end(), 0u);
  return static_cast<uint32_t>(rank.queue_pairs.size() - static_cast<size_t>(none)) + 1;
}

std::string purpose_of(const RingShape& shape) {
  return std::to_string(shape.world_size) + " x " + std::to_string(shape.slots) + " slots of " +
         std::to_string(slot_stride(shape.slot_bytes)) + " bytes on rank " +
         std::to_string(shape.rank);
}

}  // namespace

VerbsTransport::VerbsTransport(std::shared_ptr<Ibverbs> verbs, const VerbsConfig& config,
                               const RingShape& shape, std::chrono::milliseconds deadline,
                               std::span<const int> peers)
    : shape_(shape),
      deadline_(deadline),
      // This rank has a place, too, as in shared memory.
      layout_(static_cast<uint32_t>(peers.size()) + 1, shape.slots, shape.slot_bytes),
      device_(std::move(verbs), config),
      pieces_((layout_.stride() - kArrivalWord + device_.max_message() - 1) /
              device_.max_message()),
      // When a message is posted, the one S before has completed and with it all credits up to
      // then. That leaves those of S + bound + 1 releases, and the bound is less than S.
      requests_per_peer_(static_cast<uint32_t>(shape.slots * (pieces_ + 2)) + kControlRequests),
      packet_number_(random_packet_number()),
      inbox_(device_, layout_.bytes(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
             purpose_of(shape)),
      outbox_(device_, layout_.bytes(), IBV_ACCESS_LOCAL_WRITE, purpose_of(shape)),
      // A message is never sent before that of its slot has been read: no receive can be missing.
      completions_(device_, peers.size() * shape.slots, peers.size() * requests_per_peer_) {
  device_.require("requests (max_qp_wr)", requests_per_peer_, device_.limits().max_qp_wr);
  for (const VerbsMemory* region : {&inbox_, &outbox_}) layout_.prepare(region->data());
  open_queues(peers);
  const size_t pairs = pair_index(shape_.world_size, 0);
  requests_.resize(pieces_);
  segments_.resize(pieces_);
  sending_.assign(pairs, 0);
  exposed_.resize(pairs);
  pulled_.resize(pairs);
  device_.keep_from_children();
}

void VerbsTransport::open_queues(std::span<const int> reached) {
  peers_ = std::vector<Peer>(static_cast<size_t>(shape_.world_size));
  uint32_t place = 0;
  for (int rank = 0; rank < shape_.world_size; ++rank) {
    const bool reaches = std::find(reached.begin(), reached.end(), rank) != reached.end();
    if (!reaches && rank != shape_.rank) continue;
    Peer& peer = peers_[rank];
    peer.place = place++;
    if (!reaches) continue;
    peer.queue.emplace(device_, completions_.queue(), completions_.receives(), requests_per_peer_,
                       static_cast<uint32_t>(rank));
    peer_by_pair_[peer.queue->number()] = rank;
  }
}

VerbsTransport::~VerbsTransport() {
  peers_.clear();  // nothing reads or writes the memory after that
}

VerbsAddress VerbsTransport::address() const {
  VerbsAddress address;
  address.gid = device_.gid();
  address.lid = device_.port_attributes().lid;
  address.mtu = device_.mtu();
  address.packet_number = packet_number_;
  address.memory = reinterpret_cast<uintptr_t>(inbox_.data());
  address.memory_bytes = inbox_.size();
  address.remote_key = inbox_.remote_key();
  for (const Peer& peer : peers_) {
    address.queue_pairs.push_back(peer.queue ? peer.queue->number() : 0);
    address.places.push_back(peer.place);
  }
  return address;
}

void VerbsTransport::connect(std::span<const VerbsAddress> addresses) {
  const std::lock_guard lock(mutex_);
  for (int rank = 0; rank < shape_.world_size; ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.queue) continue;
    const VerbsAddress& remote = addresses[static_cast<size_t>(rank)];
    const std::string who = "rank " + std::to_string(rank);
    const auto own = static_cast<size_t>(shape_.rank);
    const VerbsLayout there(places_of(remote), shape_.slots, shape_.slot_bytes);
    if (remote.queue_pairs.size() != peers_.size() || remote.places.size() != peers_.size() ||
        remote.places[own] >= places_of(remote) || remote.memory_bytes != there.bytes()) {
      throw ChannelError(ErrorKind::kProtocol,
                         who + " announced an inbox of " + std::to_string(remote.memory_bytes) +
                             " bytes for " + std::to_string(remote.queue_pairs.size()) +
                             " ranks, in which there is no room for the slots of rank " +
                             std::to_string(shape_.rank));
    }
    peer.memory = remote.memory;
    peer.remote_key = remote.remote_key;
    peer.place_there = remote.places[own];
    peer.slots_there = there.slot_offset(peer.place_there, 0);
    peer.last_heard = Clock::now();
    try {
      peer.queue->connect(
          {remote.gid, remote.lid, remote.mtu, remote.queue_pairs[own], remote.packet_number},
          packet_number_);
    } catch (const ChannelError& error) {
      throw ChannelError(error.kind(), who + ": " + error.what() +
                                           ". Its GID must be reachable from this device: both on "
                                           "one network, ports of one kind");
    }
  }
}

std::byte* VerbsTransport::inbox(int source, uint32_t slot) {
  return inbox_.data() + layout_.slot_offset(peers_[source].place, slot);
}

std::byte* VerbsTransport::outbox(int destination, uint32_t slot) {
  const size_t pair = pair_index(destination, slot);
  std::unique_lock lock(mutex_);
  // Its receiver has read what stood here; the device, which may still send it again, must know.
  const bool free = await(lock, deadline_, interrupt_,
                          [&] { return sending_[pair] == 0 || peers_[destination].fault; });
  if (!free) {
    throw ChannelError(ErrorKind::kTransport,
                       "RDMA device " + device_.label() + " did not complete a message to rank " +
                           std::to_string(destination) + " that was read long ago" + kKernelLog);
  }
  return outbox_.data() + layout_.slot_offset(peers_[destination].place, slot);
}

void VerbsTransport::deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[destination];
  if (peer.fault) return;  // as with a peer in shared memory that has ended: `wait` tells
  const auto index = static_cast<uint32_t>(sequence % shape_.slots);
  const uint64_t remote_slot = peer.slots_there + index * layout_.stride();
  size_t count = 0;
  for (size_t at = kArrivalWord; at < bytes; ++count) {
    const size_t length = std::min<size_t>(bytes - at, device_.max_message());
    segments_[count] = {reinterpret_cast<uintptr_t>(slot + at), static_cast<uint32_t>(length),
                        outbox_.local_key()};
    requests_[count] = write_request(destination, segments_[count], remote_slot + at);
    at += length;
  }
  ibv_send_wr& last = requests_[count - 1];
  last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  last.imm_data = htonl(static_cast<uint32_t>(sequence));
  sending_[pair_index(destination, index)] = 1;
  post(destination, {requests_.data(), count}, kFirstSlotTag + pair_index(destination, index));
}

ibv_send_wr VerbsTransport::write_request(int peer, ibv_sge& piece, uint64_t remote_offset) const {
  ibv_send_wr request{};
  request.opcode = IBV_WR_RDMA_WRITE;
  request.sg_list = &piece;
  request.num_sge = 1;
  if (piece.length <= peers_[peer].queue->inline_bytes()) request.send_flags = IBV_SEND_INLINE;
  request.wr.rdma.remote_addr = peers_[peer].memory + remote_offset;
  request.wr.rdma.rkey = peers_[peer].remote_key;
  return request;
}

void VerbsTransport::post(int peer, std::span<ibv_send_wr> requests, uint64_t tag) {
  if (const int error = peers_[peer].queue->post(requests, tag); error != 0) {
    lose(peer, PeerState::kFailed,
         std::string("the device takes no request: ") + std::strerror(error) + kKernelLog);
  }
}

void VerbsTransport::progress() {
  const std::lock_guard lock(mutex_);
  drain();
}

void VerbsTransport::drain() {
  std::array<ibv_wc, VerbsCompletions::kReceiveBatch> batch;
  int count;
  do {
    count = completions_.poll(batch);
    for (int i = 0; i < count; ++i) take(batch[static_cast<size_t>(i)]);
    const int error = completions_.replenish();
    if (error != 0) {
      lose_all(std::string("the device takes no receive: ") + std::strerror(error) + kKernelLog);
    }
  } while (count > 0);
  if (count < 0) lose_all(std::string("the completion queue failed") + kKernelLog);
}

void VerbsTransport::take(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS) return take_failure(completion);
  if (completion.wr_id == kReceiveId) return take_arrival(completion);
  const auto index = VerbsQueue::peer_of(completion.wr_id);
  Peer& peer = peers_[index];
  peer.heard = true;
  const VerbsQueue::Chain chain = peer.queue->retire(completion.wr_id);
  if (chain.tag >= kFirstSlotTag) {
    sending_[chain.tag - kFirstSlotTag] = 0;
  } else if (chain.tag == kReadTag) {
    peer.reading = false;
  }
}

void VerbsTransport::take_arrival(const ibv_wc& completion) {
  const auto found = peer_by_pair_.find(completion.qp_num);
  if (found == peer_by_pair_.end()) return lose_all("a message came from no connection");
  const int source = found->second;
  Peer& peer = peers_[source];
  const auto expected = static_cast<uint32_t>(peer.received);
  if (completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM || ntohl(completion.imm_data) != expected) {
    return lose(source, PeerState::kFailed,
                "it announced message " + std::to_string(ntohl(completion.imm_data)) + " where " +
                    std::to_string(expected) + " was due (kind of completion " +
                    std::to_string(completion.opcode) +
                    "): install one version of torchrec-bls on all ranks");
  }
  peer.heard = true;
  const auto slot = static_cast<uint32_t>(peer.received % shape_.slots);
  ++peer.received;
  arrival_word(inbox(source, slot)).store(peer.received, std::memory_order_release);
}

void VerbsTransport::take_failure(const ibv_wc& completion) {
  int index = static_cast<int>(VerbsQueue::peer_of(completion.wr_id));
  if (completion.wr_id == kReceiveId) {
    const auto found = peer_by_pair_.find(completion.qp_num);
    if (found == peer_by_pair_.end()) return;
    index = found->second;
  }
  if (peers_[index].fault) return;  // the queue is flushed
  // Whatever the status: Soft-RoCE refuses or flushes without a link, hardware goes on trying.
  if (!device_.port_active()) {
    return lose(index, PeerState::kFailed,
                "the port is down. Bring the link up (ip link set DEVICE up; ibv_devinfo or rdma "
                "link shows the state) and start the ranks again");
  }
  const bool unanswered = completion.status == IBV_WC_RETRY_EXC_ERR;
  lose(index, unanswered ? PeerState::kDead : PeerState::kFailed,
       explain_status(completion.status, completion.vendor_err));
}

void VerbsTransport::lose(int peer, PeerState state, const std::string& what) {
  if (peers_[peer].fault) return;
  peers_[peer].fault = {state, device_.label() + ": " + what};
  // It may still be connected, and would wait for this rank until the deadline.
  peers_[peer].queue->break_off();
}

void VerbsTransport::lose_all(const std::string& what) {
  for (int peer = 0; peer < shape_.world_size; ++peer) {
    if (peers_[peer].queue) lose(peer, PeerState::kFailed, what);
  }
}

void VerbsTransport::return_credit(int source, uint64_t consumed) {
  const std::lock_guard lock(mutex_);
  peers_[source].told_credit = consumed;
  tell_credit(source);
}

void VerbsTransport::tell_credit(int peer) {
  write_word(peer, offsetof(PeerBlock, credit), peers_[peer].told_credit);
}

/// Sets a word of this rank's block at `peer`.
void VerbsTransport::write_word(int peer, size_t offset, uint64_t value) {
  if (peers_[peer].fault) return;
  ibv_sge piece{reinterpret_cast<uintptr_t>(&value), sizeof(value), 0};  // travels inline
  ibv_send_wr request =
      write_request(peer, piece, VerbsLayout::block_offset(peers_[peer].place_there) + offset);
  post(peer, {&request, 1}, kControlTag);
}

uint64_t VerbsTransport::credit(int destination) {
  return block_of(destination).credit.load(std::memory_order_acquire);
}

std::byte* VerbsTransport::expose(int destination, uint32_t slot, size_t bytes,
                                  MemoryAddress& address) {
  VerbsMemory& memory = exposed_[pair_index(destination, slot)];
  if (memory.size() < bytes) {
    memory = VerbsMemory();
    memory = VerbsMemory(device_, bytes, IBV_ACCESS_REMOTE_READ,
                         "a message of rank " + std::to_string(shape_.rank) + " to rank " +
                             std::to_string(destination) + " larger than a slot");
  }
  address = {{reinterpret_cast<uintptr_t>(memory.data()), memory.remote_key(), 0}, bytes};
  return memory.data();
}

void VerbsTransport::retract(int destination, uint32_t slot) {
  exposed_[pair_index(destination, slot)] = VerbsMemory();
}

const std::byte* VerbsTransport::pull(int source, uint32_t slot, const MemoryAddress& address,
                                      size_t bytes) {
  VerbsMemory& memory = pulled_[pair_index(source, slot)];
  if (memory.size() < bytes) {
    memory = VerbsMemory();
    memory = VerbsMemory(device_, bytes, IBV_ACCESS_LOCAL_WRITE,
                         "a message of rank " + std::to_string(source) + " to rank " +
                             std::to_string(shape_.rank) + " larger than a slot");
  }
  std::unique_lock lock(mutex_);
  Peer& peer = peers_[source];
  const Clock::time_point end = Clock::now() + deadline_;
  for (uint64_t at = 0; at < bytes && !peer.fault;) {
    const auto length =
        static_cast<uint32_t>(std::min<uint64_t>(bytes - at, device_.max_message()));
    ibv_sge piece{reinterpret_cast<uintptr_t>(memory.data() + at), length, memory.local_key()};
    ibv_send_wr request{};
    request.opcode = IBV_WR_RDMA_READ;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.wr.rdma.remote_addr = address.where[0] + at;
    request.wr.rdma.rkey = static_cast<uint32_t>(address.where[1]);
    peer.reading = true;
    post(source, {&request, 1}, kReadTag);
    if (!await(lock, end - Clock::now(), interrupt_, [&] { return !peer.reading || peer.fault; })) {
      throw ChannelError(ErrorKind::kTimeout, device_.label() + ": reading " +
                                                  std::to_string(bytes) +
                                                  " bytes did not end within the deadline");
    }
    at += length;
  }
  if (peer.fault) throw ChannelError(ErrorKind::kTransport, peer.fault->text);
  return memory.data();
}

void VerbsTransport::drop(int source, uint32_t slot) {
  pulled_[pair_index(source, slot)] = VerbsMemory();
}

void VerbsTransport::arm() {
  const std::lock_guard lock(mutex_);
  completions_.arm();
  drain();  // what completed before gives no event
}

void VerbsTransport::await_event(Clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::nanoseconds>(until - Clock::now()).count();
  if (left > 0) completions_.await_event(left);
  const std::lock_guard lock(mutex_);
  read_device_events();
}

void VerbsTransport::sleep(bool (*ready)(void*), void* context, Clock::time_point until) {
  arm();
  if (!ready(context) && poisoned().load() == 0) await_event(until);
}

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

PeerState VerbsTransport::peer_state(int peer) {
  const std::lock_guard lock(mutex_);
  // Before the completions: all messages of a peer that has closed are among them then.
  const bool has_closed = closed(peer);
  drain();
  read_device_events();
  if (has_closed) return PeerState::kClosed;
  probe_if_silent(peer);
  return peers_[peer].fault ? peers_[peer].fault->state : PeerState::kOpen;
}

void VerbsTransport::probe_if_silent(int index) {
  Peer& peer = peers_[index];
  if (!peer.queue || peer.fault) return;
  const Clock::time_point now = Clock::now();
  if (std::exchange(peer.heard, false)) peer.last_heard = now;
  // What is under way will be answered, or fail, by itself.
  if (now - peer.last_heard > kSilence && peer.queue->in_flight() == 0) tell_credit(index);
}

std::string VerbsTransport::peer_fault(int peer) {
  const std::lock_guard lock(mutex_);
  return peers_[peer].fault ? peers_[peer].fault->text : std::string();
}

bool VerbsTransport::closed(int peer) const {
  return block_of(peer).closed.load(std::memory_order_acquire) != 0;
}

void VerbsTransport::read_device_events() {
  ibv_async_event event;
  while (device_.verbs().get_async_event(device_.context(), &event) == 0) {
    const ibv_event_type type = event.event_type;
    const auto broken = type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR ||
                                type == IBV_EVENT_QP_ACCESS_ERR
                            ? peer_by_pair_.find(event.element.qp->qp_num)
                            : peer_by_pair_.end();
    device_.verbs().ack_async_event(&event);
    if (broken != peer_by_pair_.end()) {
      lose(broken->second, PeerState::kFailed, explain_event(type));
    } else if (type == IBV_EVENT_DEVICE_FATAL || type == IBV_EVENT_CQ_ERR ||
               type == IBV_EVENT_SRQ_ERR) {
      lose_all(explain_event(type));
    }
    // A port that goes down may come back before the retries are over.
  }
}

void VerbsTransport::announce_close() {
  std::unique_lock lock(mutex_);
  drain();
  for (int index = 0; index < shape_.world_size; ++index) {
    if (!peers_[index].queue) continue;
    // Also to those that have closed: they may be keeping a large message for this rank.
    write_word(index, offsetof(PeerBlock, closed), 1);
  }
  block_of(shape_.rank).closed.store(1, std::memory_order_release);
  // Nobody expects anything of a rank that has failed, and one of its peers may be dead.
  latch_poison();
  flush(lock, poison_ ? kPoisonGrace : deadline_, interrupt_);
}

void VerbsTransport::abandon() {
  completions_.abandon();
  device_.abandon();
}

/// Lets what is under way leave, except to peers that do not want it any more.
void VerbsTransport::flush(std::unique_lock<std::mutex>& lock, Clock::duration limit,
                           const Interrupt& interrupt) {
  await(lock, limit, interrupt, [&] {
    for (int index = 0; index < shape_.world_size; ++index) {
      const Peer& peer = peers_[index];
      if (peer.queue && !peer.fault && !closed(index) && peer.queue->in_flight() > 0) return false;
    }
    return true;
  });
}

/// Waits until `done()`; false after `limit`. Others may come in between.
template <class Done>
bool VerbsTransport::await(std::unique_lock<std::mutex>& lock, Clock::duration limit,
                           const Interrupt& interrupt, Done done) {
  if (done()) return true;
  const Clock::time_point start = Clock::now();
  for (;;) {
    drain();
    if (done()) return true;
    const Clock::duration waited = Clock::now() - start;
    if (waited >= limit) return false;
    lock.unlock();
    if (interrupt && waited >= kBeforeInterrupt) interrupt();
    sched_yield();
    lock.lock();
  }
}

}  // namespace bls
