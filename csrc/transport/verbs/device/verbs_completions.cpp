#include "transport/verbs/device/verbs_completions.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "errors.h"

namespace bls {
namespace {

void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

VerbsCompletions::VerbsCompletions(const VerbsDevice& device, size_t messages, size_t requests)
    : device_(device) {
  const size_t receives = messages + kReceiveBatch;
  const size_t completions = receives + requests;
  device.require("receives (max_srq_wr)", receives, device.limits().max_srq_wr);
  device.require("completions (max_cqe)", completions, device.limits().max_cqe);

  Ibverbs& library = device.verbs();
  events_ = {library.create_comp_channel(device.context()),
             [&library](ibv_comp_channel* channel) { library.destroy_comp_channel(channel); }};
  if (!events_) verbs_failure(device, "cannot create a completion channel");
  set_nonblocking(events_->fd);
  set_nonblocking(device.context()->async_fd);
  queue_ = {library.create_cq(device.context(), static_cast<int>(completions), events_.get()),
            [&library](ibv_cq* queue) { library.destroy_cq(queue); }};
  if (!queue_) {
    verbs_failure(device,
                  "cannot create a queue for " + std::to_string(completions) + " completions");
  }
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = static_cast<uint32_t>(receives);
  attributes.attr.max_sge = 1;
  receives_ = {library.create_srq(device.domain(), &attributes),
               [&library](ibv_srq* queue) { library.destroy_srq(queue); }};
  if (!receives_) {
    verbs_failure(device, "cannot create a queue for " + std::to_string(receives) + " receives");
  }
  used_receives_ = static_cast<uint32_t>(receives);
  if (const int error = replenish(); error != 0) {
    errno = error;
    verbs_failure(device, "cannot post receives");
  }
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) verbs_failure(device, "cannot create an eventfd");
}

VerbsCompletions::~VerbsCompletions() { ::close(wake_); }

int VerbsCompletions::poll(std::span<ibv_wc> batch) {
  const int count = device_.verbs().poll_cq(queue_.get(), batch);
  for (int i = 0; i < count; ++i) {
    if (batch[static_cast<size_t>(i)].wr_id == kReceiveId) ++used_receives_;
  }
  return count;
}

int VerbsCompletions::replenish() {
  while (used_receives_ >= kReceiveBatch) {
    std::array<ibv_recv_wr, kReceiveBatch> chain{};
    for (size_t i = 0; i < chain.size(); ++i) {
      chain[i].wr_id = kReceiveId;  // without memory: a message stands where its sender put it
      chain[i].next = i + 1 < chain.size() ? &chain[i + 1] : nullptr;
    }
    ibv_recv_wr* bad = nullptr;
    const int error = device_.verbs().post_srq_recv(receives_.get(), chain.data(), &bad);
    if (error != 0) return error;
    used_receives_ -= kReceiveBatch;
  }
  return 0;
}

void VerbsCompletions::arm() { device_.verbs().req_notify_cq(queue_.get()); }

void VerbsCompletions::await_event(int64_t left) {
  std::array<pollfd, 3> sources{
      {{events_->fd, POLLIN, 0}, {wake_, POLLIN, 0}, {device_.context()->async_fd, POLLIN, 0}}};
  const timespec timeout{static_cast<time_t>(left / 1'000'000'000),
                         static_cast<long>(left % 1'000'000'000)};
  ppoll(sources.data(), sources.size(), &timeout, nullptr);
  ibv_cq* queue = nullptr;
  while (device_.verbs().get_cq_event(events_.get(), &queue) == 0) {
    device_.verbs().ack_cq_events(queue, 1);
  }
  uint64_t wakes;
  while (::read(wake_, &wakes, sizeof(wakes)) > 0) {
  }
}

void VerbsCompletions::abandon() const {
  for (const int fd : {events_->fd, wake_}) ::close(fd);
}

void VerbsCompletions::wake() {
  const uint64_t one = 1;
  static_cast<void>(::write(wake_, &one, sizeof(one)));
}

}  // namespace bls
