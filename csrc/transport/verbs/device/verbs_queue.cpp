#include "transport/verbs/device/verbs_queue.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "errors.h"

namespace bls {
namespace {

// Control words always travel inline.
constexpr uint32_t kWordBytes = 8;

ibv_mtu mtu_of(uint32_t bytes) {
  if (bytes >= 4096) return IBV_MTU_4096;
  if (bytes >= 2048) return IBV_MTU_2048;
  if (bytes >= 1024) return IBV_MTU_1024;
  return bytes >= 512 ? IBV_MTU_512 : IBV_MTU_256;
}

}  // namespace

VerbsQueue::VerbsQueue(const VerbsDevice& device, ibv_cq* completions, ibv_srq* receives,
                       uint32_t capacity, uint32_t peer)
    : device_(device), capacity_(capacity), next_id_(uint64_t{peer} << 32) {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = completions;
  attributes.recv_cq = completions;
  attributes.srq = receives;
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = capacity;
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_inline_data = std::max(device.config().inline_bytes, kWordBytes);
  const auto destroy = [verbs = &device.verbs()](ibv_qp* pair) { verbs->destroy_qp(pair); };
  pair_ = {device.verbs().create_qp(device.domain(), &attributes), destroy};
  while (!pair_ && attributes.cap.max_inline_data > kWordBytes) {
    // What a device can take inline depends on everything else, so that only trying tells.
    attributes.cap.max_inline_data = std::max(attributes.cap.max_inline_data / 2, kWordBytes);
    attributes.cap.max_send_wr = capacity;
    pair_ = {device.verbs().create_qp(device.domain(), &attributes), destroy};
  }
  if (!pair_) {
    verbs_failure(device, "cannot create a queue pair for " + std::to_string(capacity) +
                              " requests, which a lower bound makes fewer (at most " +
                              std::to_string(device.limits().max_qp_wr) + ", and " +
                              std::to_string(device.limits().max_qp) +
                              " queue pairs on the device)");
  }
  inline_bytes_ = attributes.cap.max_inline_data;

  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = static_cast<uint8_t>(device.config().port);
  init.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  modify(init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "initialize");
}

void VerbsQueue::modify(ibv_qp_attr& attributes, int mask, const char* what) {
  if (const int error = device_.verbs().modify_qp(pair_.get(), &attributes, mask); error != 0) {
    errno = error;
    verbs_failure(device_, std::string("cannot ") + what + " a queue pair");
  }
}

void VerbsQueue::connect(const VerbsEndpoint& remote, uint32_t packet_number) {
  const VerbsConfig& config = device_.config();
  ibv_qp_attr receive{};
  receive.qp_state = IBV_QPS_RTR;
  receive.path_mtu = mtu_of(std::min(device_.mtu(), remote.mtu));
  receive.dest_qp_num = remote.queue_pair;
  receive.rq_psn = remote.packet_number;
  receive.max_dest_rd_atomic = 1;  // messages that are pulled are pulled one at a time
  receive.min_rnr_timer = static_cast<uint8_t>(config.min_rnr_timer);
  receive.ah_attr.dlid = remote.lid;
  receive.ah_attr.sl = static_cast<uint8_t>(config.service_level);
  receive.ah_attr.port_num = static_cast<uint8_t>(config.port);
  receive.ah_attr.is_global = device_.global() ? 1 : 0;
  if (device_.global()) {
    receive.ah_attr.grh.dgid = remote.gid;
    receive.ah_attr.grh.sgid_index = static_cast<uint8_t>(config.gid_index);
    receive.ah_attr.grh.hop_limit = 64;
    receive.ah_attr.grh.traffic_class = static_cast<uint8_t>(config.traffic_class);
  }
  modify(receive,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
         "connect (to receive)");

  ibv_qp_attr send{};
  send.qp_state = IBV_QPS_RTS;
  send.timeout = static_cast<uint8_t>(config.timeout);
  send.retry_cnt = static_cast<uint8_t>(config.retry_count);
  send.rnr_retry = static_cast<uint8_t>(config.rnr_retry);
  send.sq_psn = packet_number;
  send.max_rd_atomic = 1;
  modify(send,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
             IBV_QP_MAX_QP_RD_ATOMIC,
         "connect (to send)");
}

int VerbsQueue::post(std::span<ibv_send_wr> requests, uint64_t tag) {
  const auto count = static_cast<uint32_t>(requests.size());
  if (in_flight_ + count > capacity_) {
    throw std::logic_error(std::to_string(in_flight_) + " requests in a send queue of " +
                           std::to_string(capacity_) + " and " + std::to_string(count) + " more");
  }
  // A chain's requests share its number: one that fails is reported although it is unsignaled.
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].wr_id = next_id_;
    requests[i].next = i + 1 < requests.size() ? &requests[i + 1] : nullptr;
  }
  requests.back().send_flags |= IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  if (const int error = device_.verbs().post_send(pair_.get(), requests.data(), &bad); error != 0) {
    return error;
  }
  chains_.push_back({next_id_, count, tag});
  in_flight_ += count;
  next_id_ = (next_id_ & ~uint64_t{0xFFFFFFFF}) | static_cast<uint32_t>(next_id_ + 1);
  return 0;
}

void VerbsQueue::break_off() {
  ibv_qp_attr broken{};
  broken.qp_state = IBV_QPS_ERR;
  // A device that is gone refuses it, and answers nobody anyway.
  static_cast<void>(device_.verbs().modify_qp(pair_.get(), &broken, IBV_QP_STATE));
}

VerbsQueue::Chain VerbsQueue::retire(uint64_t id) {
  if (chains_.empty() || chains_.front().id != id) {
    throw std::logic_error(
        "completion " + std::to_string(id) + " where " +
        (chains_.empty() ? std::string("none") : std::to_string(chains_.front().id)) + " is due");
  }
  const Chain chain = chains_.front();
  chains_.pop_front();
  in_flight_ -= chain.requests;
  return chain;
}

}  // namespace bls
