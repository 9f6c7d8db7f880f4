#pragma once

#include <deque>
#include <span>
#include <string>

#include "transport/verbs/device/verbs_device.h"

namespace bls {

/// Where a rank's queue pair for this rank is. Exchanged through the rendezvous.
struct VerbsEndpoint {
  ibv_gid gid{};
  uint16_t lid = 0;
  uint32_t mtu = 0;  ///< bytes
  uint32_t queue_pair = 0;
  uint32_t packet_number = 0;  ///< of the first packet it sends
};

/// The reliable connection to one peer, with an exact account of its send queue.
///
/// Requests are posted in chains; only the last of a chain is signaled, and its completion retires
/// the chain. Devices need not notice a queue that is posted beyond its capacity, so this class
/// does.
class VerbsQueue {
 public:
  /// Chains wait for their completion in order; `tag` is the poster's.
  struct Chain {
    uint64_t id;
    uint32_t requests;
    uint64_t tag;
  };

  VerbsQueue(const VerbsDevice& device, ibv_cq* completions, ibv_srq* receives, uint32_t capacity,
             uint32_t peer);

  uint32_t number() const { return pair_->qp_num; }
  uint32_t inline_bytes() const { return inline_bytes_; }
  /// Connects to `remote`. `packet_number` is that of the first packet sent here.
  void connect(const VerbsEndpoint& remote, uint32_t packet_number);

  /// Posts `requests` with one doorbell. Returns 0 or what the device said. Throws
  /// std::logic_error when there is no room: callers know beforehand.
  int post(std::span<ibv_send_wr> requests, uint64_t tag);
  /// Nothing is sent or taken any more, and the peer gets no answer.
  void break_off();
  /// Takes a completion of this queue that was successful. Returns the chain that it retires;
  /// throws std::logic_error when another one is due.
  Chain retire(uint64_t id);
  /// Requests posted and not retired.
  uint32_t in_flight() const { return in_flight_; }
  /// Whether `id` of a completion is of a chain of `peer`.
  static uint32_t peer_of(uint64_t id) { return static_cast<uint32_t>(id >> 32); }

 private:
  void modify(ibv_qp_attr& attributes, int mask, const char* what);

  const VerbsDevice& device_;
  VerbsHandle<ibv_qp> pair_;
  uint32_t capacity_;
  uint32_t inline_bytes_ = 0;
  uint64_t next_id_;
  uint32_t in_flight_ = 0;
  std::deque<Chain> chains_;
};

}  // namespace bls
