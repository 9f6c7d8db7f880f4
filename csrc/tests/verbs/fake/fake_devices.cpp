// Devices, their ports and events, protection domains and registered memory.

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tests/verbs/fake/fake_objects.h"

namespace bls::testing {

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

}  // namespace bls::testing
