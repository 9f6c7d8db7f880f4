#include "transport/verbs_transport.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <random>

#include "errors.h"
#include "transport/verbs_status.h"

namespace bls {
namespace {

constexpr size_t kPoisonText = 1020;
constexpr size_t kArrivalWord = sizeof(uint64_t);
/// Receives are posted again this many at a time.
constexpr uint32_t kReceiveBatch = 16;
/// Besides messages and credits, a send queue holds the end of the channel, a poison of two
/// requests, a read and a probe at most.
constexpr uint32_t kControlRequests = 5;
/// How long telling others of a failure may take.
constexpr std::chrono::milliseconds kPoisonGrace{200};
/// A peer of which nothing was heard for so long is written to, to see whether it answers.
constexpr std::chrono::seconds kSilence{1};

constexpr uint64_t kReceiveId = std::numeric_limits<uint64_t>::max();

// Tags of chains; a message has that of its slot, counted from kFirstSlotTag on.
constexpr uint64_t kControlTag = 0;
constexpr uint64_t kReadTag = 1;
constexpr uint64_t kFirstSlotTag = 2;

void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

uint32_t random_packet_number() {
  // Packets of an earlier connection with the same numbers are then told from this one's.
  return std::random_device{}() & 0xFFFFFF;
}

std::string slots_of(const RingShape& shape) {
  return std::to_string(shape.world_size) + " x " + std::to_string(shape.slots) + " slots";
}

}  // namespace

/// What each peer writes about itself, at the head of the inbox region behind the poison word. In
/// the outbox region the same place holds the poison that is written to that peer.
struct VerbsTransport::PeerBlock {
  alignas(kCacheLine) std::atomic<uint64_t> credit;
  std::atomic<uint64_t> closed;
  alignas(kCacheLine) uint32_t poison_origin;  // plus 1
  char poison_text[kPoisonText];
};

VerbsTransport::VerbsTransport(std::shared_ptr<Ibverbs> verbs, const VerbsConfig& config,
                               const RingShape& shape, std::chrono::milliseconds deadline)
    : shape_(shape),
      deadline_(deadline),
      stride_(slot_stride(shape.slot_bytes)),
      ring_offset_(
          align_up(kCacheLine + static_cast<size_t>(shape.world_size) * sizeof(PeerBlock), kPage)),
      device_(std::move(verbs), config),
      packet_number_(random_packet_number()),
      pieces_((stride_ - kArrivalWord + device_.max_message() - 1) / device_.max_message()) {
  const size_t world = static_cast<size_t>(shape_.world_size);
  const size_t pairs = world * shape_.slots;
  // A message is never sent before that of its slot has been read, so that no receive is missing.
  const size_t receives = pairs + kReceiveBatch;
  // When a message is posted, the one S before has completed and with it all credits up to then.
  // That leaves those of S + bound + 1 releases, and the bound is less than S.
  const size_t sends = shape_.slots * (pieces_ + 2) + kControlRequests;
  const size_t completions = receives + (world - 1) * sends;
  const ibv_device_attr& limits = device_.limits();
  const auto check = [&](const char* what, size_t wanted, int most) {
    if (wanted <= static_cast<size_t>(most)) return;
    throw ChannelError(ErrorKind::kRendezvous, "RDMA device " + device_.label() +
                                                   " has queues of " + std::to_string(most) + " " +
                                                   what + ", and " + slots_of(shape_) + " need " +
                                                   std::to_string(wanted) + ": lower the bound");
  };
  check("receives (max_srq_wr)", receives, limits.max_srq_wr);
  check("requests (max_qp_wr)", sends, limits.max_qp_wr);
  check("completions (max_cqe)", completions, limits.max_cqe);
  receives_ = static_cast<uint32_t>(receives);

  const size_t bytes = ring_offset_ + pairs * stride_;
  const std::string purpose = slots_of(shape_) + " of " + std::to_string(stride_) +
                              " bytes on rank " + std::to_string(shape_.rank);
  inbox_ = VerbsMemory(device_, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, purpose);
  outbox_ = VerbsMemory(device_, bytes, IBV_ACCESS_LOCAL_WRITE, purpose);
  for (const VerbsMemory* memory : {&inbox_, &outbox_}) {
    new (memory->data()) std::atomic<uint32_t>(0);
    for (int peer = 0; peer < shape_.world_size; ++peer) {
      new (memory->data() + kCacheLine + static_cast<size_t>(peer) * sizeof(PeerBlock)) PeerBlock{};
    }
  }

  Ibverbs& library = device_.verbs();
  events_ = {library.create_comp_channel(device_.context()),
             [&library](ibv_comp_channel* channel) { library.destroy_comp_channel(channel); }};
  if (!events_) verbs_failure(device_, "cannot create a completion channel");
  set_nonblocking(events_->fd);
  set_nonblocking(device_.context()->async_fd);
  completions_ = {
      library.create_cq(device_.context(), static_cast<int>(completions), events_.get()),
      [&library](ibv_cq* queue) { library.destroy_cq(queue); }};
  if (!completions_) {
    verbs_failure(device_,
                  "cannot create a queue for " + std::to_string(completions) + " completions");
  }
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = receives_;
  attributes.attr.max_sge = 1;
  receive_queue_ = {library.create_srq(device_.domain(), &attributes),
                    [&library](ibv_srq* queue) { library.destroy_srq(queue); }};
  if (!receive_queue_) {
    verbs_failure(device_, "cannot create a queue for " + std::to_string(receives_) + " receives");
  }
  used_receives_ = receives_;

  peers_ = std::vector<Peer>(world);
  for (int peer = 0; peer < shape_.world_size; ++peer) {
    if (peer == shape_.rank) continue;
    VerbsQueue& queue =
        peers_[peer].queue.emplace(device_, completions_.get(), receive_queue_.get(),
                                   static_cast<uint32_t>(sends), static_cast<uint32_t>(peer));
    peer_by_pair_[queue.number()] = peer;
  }
  requests_.resize(pieces_);
  segments_.resize(pieces_);
  sending_.assign(pairs, 0);
  exposed_.resize(pairs);
  pulled_.resize(pairs);
  replenish();
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) verbs_failure(device_, "cannot create an eventfd");
}

VerbsTransport::~VerbsTransport() {
  peers_.clear();  // nothing reads or writes the memory after that
  if (wake_ >= 0) ::close(wake_);
}

VerbsAddress VerbsTransport::address() const {
  VerbsAddress address;
  address.gid = device_.gid();
  address.lid = device_.port_attributes().lid;
  address.mtu = 128u << device_.port_attributes().active_mtu;
  address.packet_number = packet_number_;
  address.memory = reinterpret_cast<uintptr_t>(inbox_.data());
  address.memory_bytes = inbox_.size();
  address.remote_key = inbox_.remote_key();
  for (const Peer& peer : peers_) {
    address.queue_pairs.push_back(peer.queue ? peer.queue->number() : 0);
  }
  return address;
}

void VerbsTransport::connect(std::span<const VerbsAddress> addresses) {
  const std::lock_guard lock(mutex_);
  for (int peer = 0; peer < shape_.world_size; ++peer) {
    if (peer == shape_.rank) continue;
    const VerbsAddress& remote = addresses[static_cast<size_t>(peer)];
    const std::string who = "rank " + std::to_string(peer);
    if (remote.memory_bytes != inbox_.size() || remote.queue_pairs.size() != peers_.size()) {
      throw ChannelError(ErrorKind::kProtocol,
                         who + " announced an inbox of " + std::to_string(remote.memory_bytes) +
                             " bytes for " + std::to_string(remote.queue_pairs.size()) +
                             " ranks, rank " + std::to_string(shape_.rank) + " has " +
                             std::to_string(inbox_.size()) + " for " +
                             std::to_string(peers_.size()));
    }
    peers_[peer].memory = remote.memory;
    peers_[peer].remote_key = remote.remote_key;
    peers_[peer].last_heard = Clock::now();
    try {
      peers_[peer].queue->connect(
          {remote.gid, remote.lid, remote.mtu, remote.queue_pairs[static_cast<size_t>(shape_.rank)],
           remote.packet_number},
          packet_number_);
    } catch (const ChannelError& error) {
      throw ChannelError(error.kind(), who + ": " + error.what() +
                                           ". Its GID must be reachable from this device: both on "
                                           "one network, ports of one kind");
    }
  }
}

size_t VerbsTransport::ring_bytes() const { return inbox_.size() - ring_offset_; }

std::byte* VerbsTransport::inbox(int source, uint32_t slot) {
  return inbox_.data() + ring_offset_ + pair_index(source, slot) * stride_;
}

std::byte* VerbsTransport::outbox(int destination, uint32_t slot) {
  const size_t pair = pair_index(destination, slot);
  std::unique_lock lock(mutex_);
  // Its receiver has read what stood here; the device, which may still send it again, must know.
  const bool free =
      await(lock, deadline_, [&] { return sending_[pair] == 0 || peers_[destination].fault; });
  if (!free) {
    throw ChannelError(ErrorKind::kTransport,
                       "RDMA device " + device_.label() + " did not complete a message to rank " +
                           std::to_string(destination) + " that was read long ago");
  }
  return outbox_.data() + ring_offset_ + pair * stride_;
}

void VerbsTransport::deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[destination];
  if (peer.fault) return;  // as with a peer in shared memory that has ended: `wait` tells
  const size_t pair = pair_index(destination, static_cast<uint32_t>(sequence % shape_.slots));
  const uint64_t remote_slot =
      ring_offset_ +
      pair_index(shape_.rank, static_cast<uint32_t>(sequence % shape_.slots)) * stride_;
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
  sending_[pair] = 1;
  post(destination, {requests_.data(), count}, kFirstSlotTag + pair);
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
         std::string("the device takes no request: ") + std::strerror(error));
  }
}

void VerbsTransport::progress() {
  const std::lock_guard lock(mutex_);
  drain();
}

void VerbsTransport::drain() {
  std::array<ibv_wc, 16> batch;
  int count;
  do {
    count = device_.verbs().poll_cq(completions_.get(), batch);
    for (int i = 0; i < count; ++i) take(batch[static_cast<size_t>(i)]);
  } while (count > 0);
  if (count < 0) lose_all("its completion queue failed");
  if (used_receives_ >= kReceiveBatch) replenish();
}

void VerbsTransport::take(const ibv_wc& completion) {
  if (completion.wr_id == kReceiveId) ++used_receives_;
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
  if (!peers_[peer].fault) peers_[peer].fault = {state, device_.label() + ": " + what};
}

void VerbsTransport::lose_all(const std::string& what) {
  for (int peer = 0; peer < shape_.world_size; ++peer) {
    if (peer != shape_.rank) lose(peer, PeerState::kFailed, what);
  }
}

void VerbsTransport::replenish() {
  std::array<ibv_recv_wr, kReceiveBatch> chain{};
  while (used_receives_ > 0) {
    const uint32_t count = std::min(used_receives_, kReceiveBatch);
    for (uint32_t i = 0; i < count; ++i) {
      chain[i].wr_id = kReceiveId;  // no memory: the message stands where its sender put it
      chain[i].next = i + 1 < count ? &chain[i + 1] : nullptr;
    }
    ibv_recv_wr* bad = nullptr;
    if (const int error = device_.verbs().post_srq_recv(receive_queue_.get(), chain.data(), &bad);
        error != 0) {
      return lose_all(std::string("it takes no receive: ") + std::strerror(error));
    }
    used_receives_ -= count;
  }
}

void VerbsTransport::return_credit(int source, uint64_t consumed) {
  const std::lock_guard lock(mutex_);
  peers_[source].told_credit = consumed;
  tell_credit(source);
}

void VerbsTransport::tell_credit(int peer) {
  write_word(peer, block_offset(shape_.rank) + offsetof(PeerBlock, credit),
             peers_[peer].told_credit);
}

/// Sets a word in the inbox region of `peer`.
void VerbsTransport::write_word(int peer, uint64_t remote_offset, uint64_t value) {
  if (peers_[peer].fault) return;
  ibv_sge piece{reinterpret_cast<uintptr_t>(&value), sizeof(value), 0};  // travels inline
  ibv_send_wr request = write_request(peer, piece, remote_offset);
  post(peer, {&request, 1}, kControlTag);
}

uint64_t VerbsTransport::credit(int destination) {
  return block_of(inbox_.data(), destination).credit.load(std::memory_order_acquire);
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

const std::byte* VerbsTransport::pull(int source, uint32_t slot, const MemoryAddress& address) {
  VerbsMemory& memory = pulled_[pair_index(source, slot)];
  if (memory.size() < address.bytes) {
    memory = VerbsMemory();
    memory = VerbsMemory(device_, address.bytes, IBV_ACCESS_LOCAL_WRITE,
                         "a message of rank " + std::to_string(source) + " to rank " +
                             std::to_string(shape_.rank) + " larger than a slot");
  }
  std::unique_lock lock(mutex_);
  Peer& peer = peers_[source];
  const Clock::time_point end = Clock::now() + deadline_;
  for (uint64_t at = 0; at < address.bytes && !peer.fault;) {
    const auto length =
        static_cast<uint32_t>(std::min<uint64_t>(address.bytes - at, device_.max_message()));
    ibv_sge piece{reinterpret_cast<uintptr_t>(memory.data() + at), length, memory.local_key()};
    ibv_send_wr request{};
    request.opcode = IBV_WR_RDMA_READ;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.wr.rdma.remote_addr = address.where[0] + at;
    request.wr.rdma.rkey = static_cast<uint32_t>(address.where[1]);
    peer.reading = true;
    post(source, {&request, 1}, kReadTag);
    if (!await(lock, end - Clock::now(), [&] { return !peer.reading || peer.fault; })) {
      throw ChannelError(ErrorKind::kTimeout, device_.label() + ": reading " +
                                                  std::to_string(address.bytes) +
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

void VerbsTransport::sleep(bool (*ready)(void*), void* context, Clock::time_point until) {
  {
    const std::lock_guard lock(mutex_);
    device_.verbs().req_notify_cq(completions_.get());
    drain();  // a completion from before the request gives no event
  }
  const auto left = std::chrono::ceil<std::chrono::nanoseconds>(until - Clock::now()).count();
  if (ready(context) || poison_word().load() != 0 || left <= 0) return;
  std::array<pollfd, 3> sources{
      {{events_->fd, POLLIN, 0}, {wake_, POLLIN, 0}, {device_.context()->async_fd, POLLIN, 0}}};
  const timespec timeout{static_cast<time_t>(left / 1'000'000'000),
                         static_cast<long>(left % 1'000'000'000)};
  ppoll(sources.data(), sources.size(), &timeout, nullptr);
  ibv_cq* queue = nullptr;
  while (device_.verbs().get_cq_event(events_.get(), &queue) == 0) {
    device_.verbs().ack_cq_events(queue, 1);
  }
  uint64_t wakes;
  while (::read(wake_, &wakes, sizeof(wakes)) > 0) {
  }
}

void VerbsTransport::wake_self() {
  const uint64_t one = 1;
  static_cast<void>(::write(wake_, &one, sizeof(one)));
}

Poison VerbsTransport::poison() const {
  const std::lock_guard lock(mutex_);
  latch_poison();
  return poison_.value_or(Poison{});
}

/// Later poison overwrites the word, but not what this rank has read.
void VerbsTransport::latch_poison() const {
  const auto sender = static_cast<int32_t>(poison_word().load(std::memory_order_acquire)) - 1;
  if (poison_ || sender == -1) return;
  if (sender < 0 || sender >= shape_.world_size) {
    poison_ = {sender, "its number is damaged"};
    return;
  }
  const PeerBlock& block = block_of(inbox_.data(), sender);
  const auto origin = static_cast<int32_t>(block.poison_origin) - 1;
  poison_ = {origin < 0 || origin >= shape_.world_size ? sender : origin,
             std::string(block.poison_text, strnlen(block.poison_text, kPoisonText))};
}

void VerbsTransport::poison_all(const std::string& message) {
  std::unique_lock lock(mutex_);
  latch_poison();
  if (!poison_) poison_ = {shape_.rank, message.substr(0, kPoisonText - 1)};
  own_poison_word().store(static_cast<uint32_t>(shape_.rank) + 1);
  spread_poison(lock);
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
    if (index == shape_.rank || peers_[index].fault || closed(index)) continue;
    PeerBlock& block = block_of(outbox_.data(), index);
    block.poison_origin = static_cast<uint32_t>(poison_->origin) + 1;
    std::memcpy(block.poison_text, poison_->message.data(), poison_->message.size());
    const auto bytes = static_cast<uint32_t>(sizeof(uint32_t) + poison_->message.size() + 1);
    std::array<ibv_sge, 2> pieces{
        {{reinterpret_cast<uintptr_t>(&block.poison_origin), bytes, outbox_.local_key()},
         {reinterpret_cast<uintptr_t>(&word), sizeof(word), 0}}};
    // The text first: whoever sees the word can read it.
    std::array<ibv_send_wr, 2> requests{
        write_request(index, pieces[0],
                      block_offset(shape_.rank) + offsetof(PeerBlock, poison_origin)),
        write_request(index, pieces[1], 0)};
    post(index, requests, kControlTag);
  }
  flush(lock, kPoisonGrace);
}

PeerState VerbsTransport::peer_state(int peer) {
  const std::lock_guard lock(mutex_);
  drain();
  read_device_events();
  if (closed(peer)) return PeerState::kClosed;
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
  return block_of(inbox_.data(), peer).closed.load(std::memory_order_acquire) != 0;
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
    if (index == shape_.rank) continue;
    // Also to those that have closed: they may be keeping a large message for this rank.
    write_word(index, block_offset(shape_.rank) + offsetof(PeerBlock, closed), 1);
  }
  flush(lock, deadline_);
  block_of(inbox_.data(), shape_.rank).closed.store(1, std::memory_order_release);
}

/// Lets what is under way leave, except to peers that do not want it any more.
void VerbsTransport::flush(std::unique_lock<std::mutex>& lock, Clock::duration limit) {
  await(lock, limit, [&] {
    for (int index = 0; index < shape_.world_size; ++index) {
      const Peer& peer = peers_[index];
      if (peer.queue && !peer.fault && !closed(index) && peer.queue->in_flight() > 0) return false;
    }
    return true;
  });
}

/// Waits until `done()`; false after `limit`. Others may come in between.
template <class Done>
bool VerbsTransport::await(std::unique_lock<std::mutex>& lock, Clock::duration limit, Done done) {
  if (done()) return true;
  const Clock::time_point end = Clock::now() + limit;
  for (;;) {
    drain();
    if (done()) return true;
    if (Clock::now() >= end) return false;
    lock.unlock();
    sched_yield();
    lock.lock();
  }
}

uint64_t VerbsTransport::block_offset(int peer) {
  return kCacheLine + static_cast<size_t>(peer) * sizeof(PeerBlock);
}

VerbsTransport::PeerBlock& VerbsTransport::block_of(std::byte* base, int peer) {
  return *std::launder(reinterpret_cast<PeerBlock*>(base + block_offset(peer)));
}

std::atomic<uint32_t>& VerbsTransport::own_poison_word() const {
  return *std::launder(reinterpret_cast<std::atomic<uint32_t>*>(inbox_.data()));
}

}  // namespace bls
