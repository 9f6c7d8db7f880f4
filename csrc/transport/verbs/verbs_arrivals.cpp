#include <arpa/inet.h>

#include <array>
#include <cstring>

#include "transport/verbs/device/verbs_status.h"
#include "transport/verbs/verbs_transport.h"

namespace bls {

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
  } else if (chain.tag == kEndTag) {
    peer.telling_end = false;
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

}  // namespace bls
