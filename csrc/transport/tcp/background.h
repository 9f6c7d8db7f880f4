#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

#include "host/memory_file.h"

namespace bls {

/// Goes on with connections while the threads that use them do something else: sends what the
/// kernel had no room for, and reads what it can't keep. One thread does that for all transports of
/// the process. It sleeps while there is nothing of the kind, and there is none before that has
/// happened once. Nobody tells it when a thread turns to something else: it looks.
class Background {
 public:
  /// Goes on with its connections.
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Looks whether its thread has left something to do. Returns whether to look again.
    virtual bool look() = 0;
    /// What was awaited has happened, or the connection has ended.
    virtual void go_on(int peer) = 0;
  };

  /// That of this process.
  static Background& of_process();

  /// Returns a number for an owner, under which it awaits events.
  uint64_t add(Owner& owner);
  /// No call of the owner is under way any more, and none comes.
  void remove(uint64_t number);
  /// Has `look` of all owners called every 2 ms until they return false. Throws ChannelError where
  /// there is no thread for that.
  void begin_looks();
  /// Has `go_on(peer)` called once, at the first of `events` (EPOLLIN, EPOLLOUT) of a socket; they
  /// replace those that were awaited before. Throws ChannelError where the kernel has no memory for
  /// that.
  void await(uint64_t number, int peer, int socket, uint32_t events);

 private:
  Background();
  void start();
  void run();
  void look();

  Descriptor epoll_;
  Descriptor wake_;
  std::atomic<bool> looks_{false};
  std::mutex mutex_;  // of the owners, and held while one is called
  std::map<uint64_t, Owner*> owners_;
  uint64_t next_ = 0;
  std::mutex starting_;
  bool runs_ = false;  // with `starting_`
};

}  // namespace bls
