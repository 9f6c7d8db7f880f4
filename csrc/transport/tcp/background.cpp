#include "transport/tcp/background.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <system_error>
#include <thread>

#include "errors.h"
#include "transport/transport.h"

namespace bls {
namespace {

// Peers of an owner, in the number of an event.
constexpr uint64_t kPeers = uint64_t{1} << 16;
constexpr uint64_t kWakeUp = std::numeric_limits<uint64_t>::max();
// Between two looks. Each takes some 10 us of a core while large messages are exchanged.
constexpr std::chrono::milliseconds kLookEvery{2};

/// Never destroyed: its thread goes on to the end of the process.
std::atomic<Background*> of_this_process{nullptr};

}  // namespace

Background& Background::of_process() {
  // A forked child has none of the threads, and perhaps a lock that nobody gives back: it gets
  // another one. What its parent's channels were is abandoned there.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { of_this_process = nullptr; });
  static_cast<void>(registered);
  Background* there = of_this_process.load();
  if (there == nullptr) {
    auto* const made = new Background;
    if (of_this_process.compare_exchange_strong(there, made)) return *made;
    delete made;
  }
  return *there;
}

Background::Background()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;  // each call is an event, and nobody reads their number
  event.data.u64 = kWakeUp;
  if (epoll_.get() < 0 || wake_.get() < 0 ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    throw ChannelError(ErrorKind::kTransport,
                       std::string("no descriptor for a channel over TCP: ") +
                           std::strerror(errno) + ". Raise the limit of open files (ulimit -n)");
  }
}

uint64_t Background::add(Owner& owner) {
  const std::lock_guard lock(mutex_);
  owners_.emplace(next_, &owner);
  return next_++;
}

void Background::remove(uint64_t number) {
  const std::lock_guard lock(mutex_);
  owners_.erase(number);
}

void Background::await(uint64_t number, int peer, int socket, uint32_t events) {
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.u64 = number * kPeers + static_cast<uint64_t>(peer);
  int failed = epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket, &event);
  if (failed != 0 && errno == ENOENT) {
    failed = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event);
  }
  if (failed != 0) {
    throw ChannelError(
        ErrorKind::kTransport,
        std::string("a connection can't be watched in the background: ") + std::strerror(errno));
  }
}

void Background::begin_looks() {
  {
    const std::lock_guard lock(starting_);
    if (!runs_) start();
    runs_ = true;
  }
  if (looks_.exchange(true)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void Background::start() {
  // Signals are for the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::string failed;
  try {
    std::thread([this] { run(); }).detach();
  } catch (const std::system_error& error) {
    failed = error.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!failed.empty()) {
    throw ChannelError(ErrorKind::kTransport,
                       "no thread that goes on with connections in the background: " + failed +
                           ". Raise the limit of threads (ulimit -u, or that of the container)");
  }
}

void Background::run() {
  pthread_setname_np(pthread_self(), "bls tcp");
  std::array<epoll_event, 16> events;
  Clock::time_point looked{};
  for (;;) {
    const int limit = looks_.load() ? static_cast<int>(kLookEvery.count()) : -1;
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), limit);
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) {
      const uint64_t name = events[static_cast<size_t>(i)].data.u64;
      if (name == kWakeUp) continue;
      const auto owner = owners_.find(name / kPeers);
      if (owner != owners_.end()) owner->second->go_on(static_cast<int>(name % kPeers));
    }
    if (looks_.load() && Clock::now() - looked >= kLookEvery) {
      look();
      looked = Clock::now();
    }
  }
}

void Background::look() {
  looks_ = false;  // first: who begins looks from here on gets one more
  bool again = false;
  for (const auto& [number, owner] : owners_) again |= owner->look();
  if (again) looks_ = true;
}

}  // namespace bls
