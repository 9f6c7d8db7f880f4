#include <algorithm>
#include <random>

#include "errors.h"
#include "transport/verbs/verbs_transport.h"

namespace bls {
namespace {

/// Besides messages and credits, a send queue holds the end of the channel, that of a forward, a
/// poison of two requests, a read and a probe at most.
constexpr uint32_t kControlRequests = 6;

/// Packets of an earlier connection with the same numbers are told from those of this one by it.
uint32_t random_packet_number() { return std::random_device{}() & 0xFFFFFF; }

/// Places in the inbox region of `rank`: one for each that it connects to and one for itself.
uint32_t places_of(const VerbsAddress& rank) {
  const auto none = std::count(rank.queue_pairs.begin(), rank.queue_pairs.end(), 0u);
  return static_cast<uint32_t>(rank.queue_pairs.size() - static_cast<size_t>(none)) + 1;
}

std::string purpose_of(const RingShape& shape) {
  return std::to_string(shape.world_size) + " x " + std::to_string(shape.slots) + " slots of " +
         std::to_string(slot_stride(shape.slot_bytes)) + " bytes on " + shape.names.of(shape.rank);
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
    const std::string who = shape_.names.of(rank);
    const auto own = static_cast<size_t>(shape_.rank);
    const VerbsLayout there(places_of(remote), shape_.slots, shape_.slot_bytes);
    if (remote.queue_pairs.size() != peers_.size() || remote.places.size() != peers_.size() ||
        remote.places[own] >= places_of(remote) || remote.memory_bytes != there.bytes()) {
      throw ChannelError(ErrorKind::kProtocol,
                         who + " announced an inbox of " + std::to_string(remote.memory_bytes) +
                             " bytes for " + std::to_string(remote.queue_pairs.size()) +
                             " ranks, in which there is no room for the slots of " +
                             shape_.names.of(shape_.rank));
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

void VerbsTransport::abandon() {
  completions_.abandon();
  device_.abandon();
}

}  // namespace bls
