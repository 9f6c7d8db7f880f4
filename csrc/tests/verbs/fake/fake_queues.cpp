// Completion queues, receives and queue pairs.

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tests/verbs/fake/fake_objects.h"

namespace bls::testing {

ibv_comp_channel* FakeIbverbs::create_comp_channel(ibv_context* context) {
  auto* const channel = new Channel{};
  channel->context = context;
  channel->fd = event_counter();
  ++static_cast<Context*>(context)->objects;
  return channel;
}

int FakeIbverbs::destroy_comp_channel(ibv_comp_channel* base) {
  ::close(base->fd);
  --static_cast<Context*>(base->context)->objects;
  delete static_cast<Channel*>(base);
  return 0;
}

ibv_cq* FakeIbverbs::create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) {
  auto* const queue = new Completions{};
  queue->context = context;
  queue->channel = channel;
  queue->capacity = static_cast<size_t>(entries);
  ++static_cast<Context*>(context)->objects;
  return queue;
}

int FakeIbverbs::destroy_cq(ibv_cq* base) {
  auto* const queue = static_cast<Completions*>(base);
  if (queue->unacknowledged != 0) misuse("a completion queue with events not acknowledged");
  --static_cast<Context*>(base->context)->objects;
  delete queue;
  return 0;
}

int FakeIbverbs::req_notify_cq(ibv_cq* queue) {
  const std::lock_guard lock(mutex_);
  static_cast<Completions*>(queue)->armed = true;
  return 0;
}

int FakeIbverbs::poll_cq(ibv_cq* base, std::span<ibv_wc> completions) {
  const std::lock_guard lock(mutex_);
  auto& queue = *static_cast<Completions*>(base);
  if (static_cast<Context*>(queue.context)->refuses(Call::kPoll)) return -1;
  if (queue.entries.empty()) return 0;
  // Never more than a few at a time.
  const size_t count = std::min({completions.size(), queue.entries.size(), draw(random_, 1, 3)});
  for (size_t i = 0; i < count; ++i) {
    const auto [completion, frees] = queue.entries.front();
    queue.entries.pop_front();
    completions[i] = completion;
    if (Pair* const pair = find_pair(completion.qp_num); pair != nullptr) pair->used -= frees;
  }
  return static_cast<int>(count);
}

int FakeIbverbs::get_cq_event(ibv_comp_channel* base, ibv_cq** queue) {
  if (!take_event(base->fd)) return -1;
  const std::lock_guard lock(mutex_);
  auto& channel = *static_cast<Channel*>(base);
  *queue = channel.events.front();
  channel.events.pop_front();
  ++static_cast<Completions*>(*queue)->unacknowledged;
  return 0;
}

void FakeIbverbs::ack_cq_events(ibv_cq* queue, unsigned events) {
  const std::lock_guard lock(mutex_);
  static_cast<Completions*>(queue)->unacknowledged -= events;
}

ibv_srq* FakeIbverbs::create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) {
  auto* const queue = new Receives{};
  queue->context = domain->context;
  queue->capacity = attributes->attr.max_wr;
  ++static_cast<Context*>(domain->context)->objects;
  return queue;
}

int FakeIbverbs::destroy_srq(ibv_srq* base) {
  --static_cast<Context*>(base->context)->objects;
  delete static_cast<Receives*>(base);
  return 0;
}

int FakeIbverbs::post_srq_recv(ibv_srq* base, ibv_recv_wr* chain, ibv_recv_wr**) {
  const std::lock_guard lock(mutex_);
  auto& queue = *static_cast<Receives*>(base);
  if (static_cast<Context*>(queue.context)->refuses(Call::kPostReceive)) return ENOMEM;
  for (; chain != nullptr; chain = chain->next) {
    if (queue.ids.size() == queue.capacity) misuse("a receive queue overflows");
    queue.ids.push_back(chain->wr_id);
  }
  return 0;
}

ibv_qp* FakeIbverbs::create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  const std::lock_guard lock(mutex_);
  auto* const context = static_cast<Context*>(domain->context);
  const FakeDevice& device = settings_[context->index];
  if (device.create_error != 0) {
    errno = device.create_error;
    return nullptr;
  }
  if (attributes->cap.max_inline_data > device.max_inline ||
      attributes->cap.max_send_wr > static_cast<uint32_t>(device.max_qp_wr)) {
    errno = EINVAL;
    return nullptr;
  }
  auto* const pair = new Pair{};
  pair->context = context;
  pair->srq = attributes->srq;
  pair->send_cq = attributes->send_cq;
  pair->recv_cq = attributes->recv_cq;
  pair->capacity = static_cast<int>(attributes->cap.max_send_wr);
  pair->qp_num = next_number_++;
  pair->state = IBV_QPS_RESET;
  pairs_[pair->qp_num] = pair;
  ++context->objects;
  return pair;
}

int FakeIbverbs::modify_qp(ibv_qp* base, ibv_qp_attr* attributes, int mask) {
  const std::lock_guard lock(mutex_);
  auto& pair = *static_cast<Pair*>(base);
  const auto needs = [&](int bits) { return (mask & bits) == bits; };
  switch (attributes->qp_state) {
    case IBV_QPS_INIT:
      if (pair.state != IBV_QPS_RESET ||
          !needs(IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) {
        return EINVAL;
      }
      break;
    case IBV_QPS_RTR:
      if (pair.state != IBV_QPS_INIT ||
          !needs(IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) {
        return EINVAL;
      }
      if (settings_[static_cast<Context*>(pair.context)->index].connect_error != 0) {
        return settings_[static_cast<Context*>(pair.context)->index].connect_error;
      }
      pair.remote = attributes->dest_qp_num;
      pair.path_mtu = attributes->path_mtu;
      break;
    case IBV_QPS_RTS:
      if (pair.state != IBV_QPS_RTR || !needs(IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                              IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)) {
        return EINVAL;
      }
      if (attributes->retry_cnt > 6) misuse("a retry count that some devices take for infinite");
      break;
    case IBV_QPS_ERR:
      break_pair(pair);
      break;
    default:
      return EINVAL;
  }
  pair.state = attributes->qp_state;
  return 0;
}

int FakeIbverbs::destroy_qp(ibv_qp* base) {
  const std::lock_guard lock(mutex_);
  auto* const pair = static_cast<Pair*>(base);
  for (ibv_cq* const queue : {pair->send_cq, pair->recv_cq}) {
    std::erase_if(static_cast<Completions*>(queue)->entries, [&](const Completions::Entry& entry) {
      return entry.completion.qp_num == pair->qp_num;
    });
  }
  std::erase_if(static_cast<Context*>(pair->context)->events, [&](const ibv_async_event& event) {
    return event.event_type <= IBV_EVENT_PATH_MIG_ERR && event.element.qp == pair;
  });
  pairs_.erase(pair->qp_num);
  --static_cast<Context*>(pair->context)->objects;
  delete pair;
  return 0;
}

int FakeIbverbs::post_send(ibv_qp* base, ibv_send_wr* chain, ibv_send_wr** bad) {
  const std::lock_guard lock(mutex_);
  auto& pair = *static_cast<Pair*>(base);
  for (; chain != nullptr; chain = chain->next) {
    *bad = chain;
    if (pair.state != IBV_QPS_RTS && pair.state != IBV_QPS_ERR) return EINVAL;
    if (chain->next == nullptr && static_cast<Context*>(pair.context)->refuses(Call::kPostSend)) {
      work_.notify_all();
      return ENOMEM;
    }
    if (pair.used == pair.capacity) misuse("a send queue overflows");
    fullest_ = std::max(fullest_, ++pair.used);
    Request request{*chain, {}, {}, {}};
    if (chain->num_sge != 1) misuse("a request without memory");
    request.piece = chain->sg_list[0];
    if ((chain->send_flags & IBV_SEND_INLINE) != 0) {
      const auto* const data = reinterpret_cast<const std::byte*>(request.piece.addr);
      request.inlined.assign(data, data + request.piece.length);
    }
    if (pair.state == IBV_QPS_ERR) {
      complete(pair, request, IBV_WC_WR_FLUSH_ERR);
    } else {
      pair.requests.push_back(std::move(request));
    }
  }
  work_.notify_all();
  return 0;
}

}  // namespace bls::testing
