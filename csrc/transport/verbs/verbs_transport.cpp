#include "transport/verbs/verbs_transport.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace bls {

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
                       "RDMA device " + device_.label() + " did not complete a message to " +
                           shape_.names.of(destination) + " that was read long ago" + kKernelLog);
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

void VerbsTransport::return_credit(int source, uint64_t consumed) {
  const std::lock_guard lock(mutex_);
  peers_[source].told_credit = consumed;
  tell_credit(source);
}

void VerbsTransport::tell_credit(int peer) {
  write_word(peer, offsetof(PeerBlock, credit), peers_[peer].told_credit);
}

/// Sets a word of this rank's block at `peer`.
void VerbsTransport::write_word(int peer, size_t offset, uint64_t value, uint64_t tag) {
  if (peers_[peer].fault) return;
  ibv_sge piece{reinterpret_cast<uintptr_t>(&value), sizeof(value), 0};  // travels inline
  ibv_send_wr request =
      write_request(peer, piece, VerbsLayout::block_offset(peers_[peer].place_there) + offset);
  post(peer, {&request, 1}, tag);
}

uint64_t VerbsTransport::credit(int destination) {
  return block_of(destination).credit.load(std::memory_order_acquire);
}

void VerbsTransport::tell_end(uint64_t count) {
  std::unique_lock lock(mutex_);
  for (int index = 0; index < shape_.world_size; ++index) {
    Peer& peer = peers_[index];
    if (!peer.queue) continue;
    // One at a time, or ends without messages between them would fill the queue.
    await(lock, deadline_, interrupt_, [&] { return !peer.telling_end || peer.fault; });
    if (peer.telling_end) continue;
    peer.telling_end = true;
    write_word(index, offsetof(PeerBlock, ended), count, kEndTag);
  }
}

uint64_t VerbsTransport::ended(int peer) {
  return block_of(peer).ended.load(std::memory_order_acquire);
}

std::byte* VerbsTransport::expose(int destination, uint32_t slot, size_t bytes,
                                  MemoryAddress& address) {
  VerbsMemory& memory = exposed_[pair_index(destination, slot)];
  if (memory.size() < bytes) {
    memory = VerbsMemory();
    memory = VerbsMemory(device_, bytes, IBV_ACCESS_REMOTE_READ,
                         "a message of " + shape_.names.of(shape_.rank) + " to " +
                             shape_.names.of(destination) + " larger than a slot");
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
                         "a message of " + shape_.names.of(source) + " to " +
                             shape_.names.of(shape_.rank) + " larger than a slot");
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

void VerbsTransport::progress() {
  const std::lock_guard lock(mutex_);
  drain();
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

}  // namespace bls
