// The thread that moves data between queue pairs.

#include <atomic>
#include <cstring>

#include "tests/verbs/fake/fake_objects.h"

namespace bls::testing {
namespace {

/// Words that ranks poll are written at once, as a device does.
void write_memory(std::byte* to, const std::byte* from, size_t bytes) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 8 == 0;
  if (bytes == 8 && aligned) {
    uint64_t word;
    std::memcpy(&word, from, sizeof(word));
    std::atomic_ref(*reinterpret_cast<uint64_t*>(to)).store(word, std::memory_order_release);
  } else if (bytes == 4 && aligned) {
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    std::atomic_ref(*reinterpret_cast<uint32_t*>(to)).store(word, std::memory_order_release);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

void FakeIbverbs::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (!step()) {
      work_.wait_for(lock, std::chrono::milliseconds(1));
    } else if (draw(random_, 0, 7) == 0) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }
}

/// Moves one thing. Returns whether there was any.
bool FakeIbverbs::step() {
  std::vector<Pair*> movable;
  for (const auto& [number, pair] : pairs_) {
    const bool dead = static_cast<Context*>(pair->context)->dead;
    if (!dead && !pair->held && (!pair->requests.empty() || !pair->answers.empty())) {
      movable.push_back(pair);
    }
  }
  if (movable.empty()) return false;
  Pair& pair = *movable[draw(random_, 0, movable.size() - 1)];
  if (!pair.answers.empty() && (pair.requests.empty() || draw(random_, 0, 1) == 0)) {
    const auto [request, status] = std::move(pair.answers.front());
    pair.answers.pop_front();
    complete(pair, request, status);
    return true;
  }
  execute(pair);
  return true;
}

void FakeIbverbs::execute(Pair& pair) {
  if (pair.state != IBV_QPS_RTS) misuse("a request on a queue pair that cannot send");
  Request request = std::move(pair.requests.front());
  pair.requests.pop_front();
  ibv_wc_status status = std::exchange(pair.failure, IBV_WC_SUCCESS);
  if (status == IBV_WC_SUCCESS) status = execute(pair, request);
  if (status == IBV_WC_SUCCESS && request.inlined.empty() &&
      request.work.opcode != IBV_WR_RDMA_READ) {
    const auto* const data = reinterpret_cast<const std::byte*>(request.piece.addr);
    request.sent.assign(data, data + request.piece.length);
  }
  pair.answers.emplace_back(std::move(request), status);
  if (status == IBV_WC_SUCCESS) return;
  break_pair(pair);
}

/// Everything that is under way completes: what was done, what failed, then what never began.
void FakeIbverbs::break_pair(Pair& pair) {
  pair.state = IBV_QPS_ERR;
  while (!pair.answers.empty()) {
    const auto [request, status] = std::move(pair.answers.front());
    pair.answers.pop_front();
    complete(pair, request, status);
  }
  while (!pair.requests.empty()) {
    const Request request = std::move(pair.requests.front());
    pair.requests.pop_front();
    complete(pair, request, IBV_WC_WR_FLUSH_ERR);
  }
}

ibv_wc_status FakeIbverbs::execute(Pair& pair, const Request& request) {
  const ibv_send_wr& work = request.work;
  const uint64_t bytes = request.inlined.empty() ? request.piece.length : request.inlined.size();
  if (bytes > settings_[static_cast<Context*>(pair.context)->index].max_message) {
    misuse("a message longer than the port allows");
  }
  Pair* const remote = find_pair(pair.remote);
  if (remote == nullptr || static_cast<Context*>(remote->context)->dead) {
    return IBV_WC_RETRY_EXC_ERR;
  }
  if (remote->state != IBV_QPS_RTR && remote->state != IBV_QPS_RTS) return IBV_WC_RETRY_EXC_ERR;
  if (remote->remote != pair.qp_num) return IBV_WC_RETRY_EXC_ERR;
  if (remote->path_mtu != pair.path_mtu) misuse("two ends with packets of different sizes");
  const bool read = work.opcode == IBV_WR_RDMA_READ;
  auto* const local = request.inlined.empty() ? reinterpret_cast<std::byte*>(request.piece.addr)
                                              : const_cast<std::byte*>(request.inlined.data());
  if (request.inlined.empty() && find(pair.context, request.piece.lkey, request.piece.addr, bytes,
                                      read ? IBV_ACCESS_LOCAL_WRITE : 0) == nullptr) {
    return IBV_WC_LOC_PROT_ERR;
  }
  if (find(remote->context, work.wr.rdma.rkey, work.wr.rdma.remote_addr, bytes,
           read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE) == nullptr) {
    break_pair(*remote);
    ibv_async_event event{};
    event.event_type = IBV_EVENT_QP_ACCESS_ERR;
    event.element.qp = remote;
    auto* const context = static_cast<Context*>(remote->context);
    context->events.push_back(event);
    give_event(context->async_fd);
    return IBV_WC_REM_ACCESS_ERR;
  }
  auto* const other = reinterpret_cast<std::byte*>(work.wr.rdma.remote_addr);
  if (work.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
    auto& receives = *static_cast<Receives*>(remote->srq);
    // Receives are numerous enough: a wait for one, which is allowed, would hide that they are not.
    if (receives.ids.empty()) return IBV_WC_RNR_RETRY_EXC_ERR;
    write_memory(other, local, bytes);
    ibv_wc arrival{};
    arrival.wr_id = receives.ids.front();
    receives.ids.pop_front();
    arrival.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    arrival.qp_num = remote->qp_num;
    arrival.imm_data = work.imm_data;
    arrival.wc_flags = IBV_WC_WITH_IMM;
    arrival.byte_len = static_cast<uint32_t>(bytes);
    push(*static_cast<Completions*>(remote->recv_cq), arrival, 0);
  } else if (work.opcode == IBV_WR_RDMA_WRITE) {
    write_memory(other, local, bytes);
  } else if (read) {
    std::memcpy(local, other, bytes);
  } else {
    misuse("a kind of request that the transport has no use for");
  }
  return IBV_WC_SUCCESS;
}

void FakeIbverbs::complete(Pair& pair, const Request& request, ibv_wc_status status) {
  if (!request.sent.empty() &&
      std::memcmp(request.sent.data(), reinterpret_cast<const void*>(request.piece.addr),
                  request.sent.size()) != 0) {
    misuse("memory of a request was written before its completion");
  }
  const bool signaled = (request.work.send_flags & IBV_SEND_SIGNALED) != 0;
  if (status == IBV_WC_SUCCESS && !signaled) {
    ++pair.unsignaled;
    return;
  }
  ibv_wc completion{};
  completion.wr_id = request.work.wr_id;
  completion.status = status;
  completion.qp_num = pair.qp_num;
  completion.opcode =
      request.work.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
  push(*static_cast<Completions*>(pair.send_cq), completion, 1 + std::exchange(pair.unsignaled, 0));
}

void FakeIbverbs::push(Completions& queue, const ibv_wc& completion, int frees) {
  if (queue.entries.size() == queue.capacity) misuse("a completion queue overflows");
  queue.entries.push_back({completion, frees});
  if (!std::exchange(queue.armed, false)) return;
  auto& channel = *static_cast<Channel*>(queue.channel);
  channel.events.push_back(&queue);
  give_event(channel.fd);
}

const FakeIbverbs::Memory* FakeIbverbs::find(ibv_context* context, uint32_t key, uint64_t address,
                                             uint64_t bytes, int access) const {
  const auto found = memories_.find(key);
  if (found == memories_.end()) return nullptr;
  const Memory& memory = *found->second;
  const auto start = reinterpret_cast<uint64_t>(memory.addr);
  const bool inside =
      address >= start && bytes <= memory.length && address - start <= memory.length - bytes;
  const bool allowed = (memory.access & access) == access;
  return memory.context == context && inside && allowed ? &memory : nullptr;
}

FakeIbverbs::Pair* FakeIbverbs::find_pair(uint32_t number) {
  const auto found = pairs_.find(number);
  return found == pairs_.end() ? nullptr : found->second;
}

}  // namespace bls::testing
