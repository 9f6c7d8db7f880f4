#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "host/memory_file.h"

namespace bls {

/// Goes on sending what the kernel had no room for, while the thread that sent it does something
/// else. One thread does that for all transports of the process. It sleeps while there is nothing
/// of the kind, and there is none before that has happened once.
class BackgroundWriter {
 public:
  /// Sends on one connection of its owner.
  class Owner {
   public:
    virtual ~Owner() = default;
    /// The kernel has room again.
    virtual void write_on(int peer) = 0;
  };

  /// That of this process.
  static BackgroundWriter& of_process();

  /// Returns a number for an owner, under which it waits for room.
  uint64_t add(Owner& owner);
  /// No call of the owner is under way any more, and none comes.
  void remove(uint64_t number);
  /// Has `write_on(peer)` called once, as soon as the socket has room. Throws ChannelError where
  /// the kernel has no memory for that, or no thread.
  void await_room(uint64_t number, int peer, int socket);

 private:
  BackgroundWriter();
  void start();
  void run();

  Descriptor epoll_;
  std::mutex mutex_;  // of the owners, and held while one is called
  std::map<uint64_t, Owner*> owners_;
  uint64_t next_ = 0;
  std::mutex starting_;
  bool runs_ = false;  // with `starting_`
};

}  // namespace bls
