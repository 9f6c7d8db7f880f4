#include "tests/verbs/fake_ibverbs.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

namespace bls::testing {
namespace {

/// For what no program may do, whatever the device says to it.
[[noreturn]] void misuse(const char* what) {
  std::fprintf(stderr, "fake verbs: %s\n", what);
  std::abort();
}

int event_counter() { return eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE); }

bool take_event(int fd) {
  uint64_t one;
  return ::read(fd, &one, sizeof(one)) == sizeof(one);
}

void give_event(int fd) {
  const uint64_t one = 1;
  if (::write(fd, &one, sizeof(one)) != sizeof(one)) misuse("event counter");
}

std::vector<ibv_gid_entry> usual_gids() {
  std::vector<ibv_gid_entry> gids(3);
  gids[0].gid.raw[0] = 0xfe;
  gids[0].gid.raw[1] = 0x80;
  gids[0].gid_type = IBV_GID_TYPE_ROCE_V1;
  gids[1] = gids[0];
  gids[1].gid_type = IBV_GID_TYPE_ROCE_V2;
  gids[2].gid.raw[10] = gids[2].gid.raw[11] = 0xff;
  gids[2].gid.raw[12] = 10;
  gids[2].gid.raw[15] = 1;
  gids[2].gid_type = IBV_GID_TYPE_ROCE_V2;
  for (uint32_t i = 0; i < gids.size(); ++i) {
    gids[i].gid_index = i;
    gids[i].port_num = 1;
  }
  return gids;
}

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

struct FakeIbverbs::Context : ibv_context {
  size_t index;
  bool dead = false;
  std::vector<ibv_port_state> ports;
  std::deque<ibv_async_event> events;
  std::optional<Call> refused;
  std::function<void()> interference;
  int objects = 0;

  bool refuses(Call call) {
    const bool it_does = refused == call;
    if (it_does) refused.reset();
    return it_does;
  }
};

struct FakeIbverbs::Memory : ibv_mr {
  int access;
};

struct FakeIbverbs::Channel : ibv_comp_channel {
  std::deque<ibv_cq*> events;
};

struct FakeIbverbs::Completions : ibv_cq {
  struct Entry {
    ibv_wc completion;
    int frees;  // places in the send queue
  };
  std::deque<Entry> entries;
  size_t capacity;
  bool armed = false;
  unsigned unacknowledged = 0;
};

struct FakeIbverbs::Receives : ibv_srq {
  std::deque<uint64_t> ids;
  size_t capacity;
};

struct FakeIbverbs::Request {
  ibv_send_wr work;
  ibv_sge piece;
  Bytes inlined;
  Bytes sent;  // what was written, for a device that has to send it again
};

struct FakeIbverbs::Pair : ibv_qp {
  uint32_t remote = 0;
  ibv_mtu path_mtu{};
  int capacity;
  int used = 0;        // places in the send queue, until a poll frees them
  int unsignaled = 0;  // done, and freed with the next signaled one
  uint8_t rnr_retry = 0;
  bool held = false;
  ibv_wc_status failure = IBV_WC_SUCCESS;  // of the next request
  std::deque<Request> requests;
  std::deque<std::pair<Request, ibv_wc_status>> answers;  // that the sender does not know of yet
};

FakeIbverbs::FakeIbverbs(std::vector<FakeDevice> devices, uint64_t seed)
    : random_(seed), settings_(std::move(devices)), devices_(settings_.size()) {
  for (size_t i = 0; i < settings_.size(); ++i) {
    if (settings_[i].gids.empty() && settings_[i].link_layer == IBV_LINK_LAYER_ETHERNET) {
      settings_[i].gids = usual_gids();
    }
    std::snprintf(devices_[i].name, sizeof(devices_[i].name), "%s", settings_[i].name.c_str());
    std::snprintf(devices_[i].dev_name, sizeof(devices_[i].dev_name), "uverbs%zu", i);
  }
  network_ = std::thread([this] { run(); });
}

FakeIbverbs::~FakeIbverbs() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  network_.join();
}

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

void FakeIbverbs::fail_next(uint32_t queue_pair, ibv_wc_status status) {
  const std::lock_guard lock(mutex_);
  find_pair(queue_pair)->failure = status;
}

void FakeIbverbs::refuse_next(ibv_context* context, Call call) {
  const std::lock_guard lock(mutex_);
  static_cast<Context*>(context)->refused = call;
}

void FakeIbverbs::hold(uint32_t queue_pair, bool held) {
  const std::lock_guard lock(mutex_);
  find_pair(queue_pair)->held = held;
  work_.notify_all();
}

void FakeIbverbs::kill(ibv_context* context) {
  const std::lock_guard lock(mutex_);
  static_cast<Context*>(context)->dead = true;
  for (const auto& [number, pair] : pairs_) {
    if (pair->context == context) break_pair(*pair);
  }
}

void FakeIbverbs::set_port_state(ibv_context* context, ibv_port_state state) {
  const std::lock_guard lock(mutex_);
  static_cast<Context*>(context)->ports.assign(static_cast<Context*>(context)->ports.size(), state);
}

void FakeIbverbs::raise(ibv_context* context, ibv_event_type type, uint32_t queue_pair) {
  const std::lock_guard lock(mutex_);
  ibv_async_event event{};
  event.event_type = type;
  if (queue_pair != 0) event.element.qp = find_pair(queue_pair);
  static_cast<Context*>(context)->events.push_back(event);
  give_event(context->async_fd);
}

void FakeIbverbs::forge_arrival(uint32_t queue_pair, uint32_t immediate) {
  const std::lock_guard lock(mutex_);
  Pair& pair = *find_pair(queue_pair);
  auto& receives = *static_cast<Receives*>(pair.srq);
  ibv_wc arrival{};
  arrival.wr_id = receives.ids.front();
  receives.ids.pop_front();
  arrival.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  arrival.qp_num = queue_pair;
  arrival.imm_data = __builtin_bswap32(immediate);
  push(*static_cast<Completions*>(pair.recv_cq), arrival, 0);
}

void FakeIbverbs::at_next_look_for_events(ibv_context* context,
                                          std::function<void()> interference) {
  const std::lock_guard lock(mutex_);
  static_cast<Context*>(context)->interference = std::move(interference);
}

int FakeIbverbs::fullest_send_queue() {
  const std::lock_guard lock(mutex_);
  return fullest_;
}

int FakeIbverbs::fork_init() {
  fork_prepared_ = true;
  return settings_.empty() ? 0 : settings_.front().fork_error;
}

ibv_device** FakeIbverbs::get_device_list(int* count) {
  *count = static_cast<int>(devices_.size());
  auto** const list = new ibv_device* [devices_.size() + 1] {};
  for (size_t i = 0; i < devices_.size(); ++i) list[i] = &devices_[i];
  return list;
}

void FakeIbverbs::free_device_list(ibv_device** list) { delete[] list; }

const char* FakeIbverbs::get_device_name(ibv_device* device) { return device->name; }

ibv_context* FakeIbverbs::open_device(ibv_device* device) {
  if (!fork_prepared_) misuse("a device is opened before forks are prepared for");
  const auto index = static_cast<size_t>(device - devices_.data());
  if (settings_[index].open_error != 0) {
    errno = settings_[index].open_error;
    return nullptr;
  }
  auto* const context = new Context{};
  context->device = device;
  context->index = index;
  context->ports = settings_[index].ports;
  context->async_fd = event_counter();
  context->cmd_fd = event_counter();
  return context;
}

int FakeIbverbs::close_device(ibv_context* base) {
  const std::lock_guard lock(mutex_);
  auto* const context = static_cast<Context*>(base);
  if (context->objects != 0) misuse("a device is closed while something of it lives");
  ::close(context->async_fd);
  ::close(context->cmd_fd);
  delete context;
  return 0;
}

int FakeIbverbs::query_device(ibv_context* base, ibv_device_attr* attributes) {
  const FakeDevice& device = settings_[static_cast<Context*>(base)->index];
  *attributes = {};
  attributes->phys_port_cnt = static_cast<uint8_t>(device.ports.size());
  attributes->max_qp = 1 << 16;
  attributes->max_qp_wr = device.max_qp_wr;
  attributes->max_srq_wr = device.max_srq_wr;
  attributes->max_cqe = device.max_cqe;
  return 0;
}

int FakeIbverbs::query_port(ibv_context* base, uint8_t port, ibv_port_attr* attributes) {
  const std::lock_guard lock(mutex_);
  const auto* const context = static_cast<Context*>(base);
  const FakeDevice& device = settings_[context->index];
  if (port < 1 || port > context->ports.size()) return EINVAL;
  *attributes = {};
  attributes->state = context->ports[port - 1u];
  attributes->active_mtu = IBV_MTU_1024;
  attributes->link_layer = device.link_layer;
  attributes->gid_tbl_len = static_cast<int>(device.gids.size());
  attributes->max_msg_sz = device.max_message;
  attributes->lid = static_cast<uint16_t>(context->index + 1);
  return 0;
}

ssize_t FakeIbverbs::query_gid_table(ibv_context* base, std::span<ibv_gid_entry> entries) {
  const auto& gids = settings_[static_cast<Context*>(base)->index].gids;
  if (entries.size() < gids.size()) return -EINVAL;
  std::copy(gids.begin(), gids.end(), entries.begin());
  return static_cast<ssize_t>(gids.size());
}

int FakeIbverbs::get_async_event(ibv_context* base, ibv_async_event* event) {
  auto* const context = static_cast<Context*>(base);
  std::function<void()> interference;
  {
    const std::lock_guard lock(mutex_);
    interference.swap(context->interference);
  }
  if (interference) interference();
  if (!take_event(context->async_fd)) return -1;
  const std::lock_guard lock(mutex_);
  *event = context->events.front();
  context->events.pop_front();
  return 0;
}

void FakeIbverbs::ack_async_event(ibv_async_event*) {}

ibv_pd* FakeIbverbs::alloc_pd(ibv_context* context) {
  ++static_cast<Context*>(context)->objects;
  return new ibv_pd{context, 0};
}

int FakeIbverbs::dealloc_pd(ibv_pd* domain) {
  --static_cast<Context*>(domain->context)->objects;
  delete domain;
  return 0;
}

ibv_mr* FakeIbverbs::reg_mr(ibv_pd* domain, void* address, size_t bytes, int access) {
  const std::lock_guard lock(mutex_);
  auto* const context = static_cast<Context*>(domain->context);
  if (const int error = settings_[context->index].register_error; error != 0) {
    errno = error;
    return nullptr;
  }
  auto* const memory = new Memory{};
  memory->context = context;
  memory->pd = domain;
  memory->addr = address;
  memory->length = bytes;
  memory->access = access;
  memory->lkey = memory->rkey = next_number_++;
  memories_[memory->lkey] = memory;
  ++context->objects;
  return memory;
}

int FakeIbverbs::dereg_mr(ibv_mr* base) {
  const std::lock_guard lock(mutex_);
  memories_.erase(base->lkey);
  --static_cast<Context*>(base->context)->objects;
  delete static_cast<Memory*>(base);
  return 0;
}

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
