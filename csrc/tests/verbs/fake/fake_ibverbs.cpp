#include "tests/verbs/fake/fake_ibverbs.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tests/verbs/fake/fake_objects.h"

namespace bls::testing {
namespace {

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

}  // namespace

void misuse(const char* what) {
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

}  // namespace bls::testing
