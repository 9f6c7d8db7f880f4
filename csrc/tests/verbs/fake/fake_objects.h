#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "tests/verbs/fake/fake_ibverbs.h"

namespace bls::testing {

/// For what no program may do, whatever the device says to it.
[[noreturn]] void misuse(const char* what);

/// Descriptors that can be read as often as something was given.
int event_counter();
bool take_event(int fd);
void give_event(int fd);

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

}  // namespace bls::testing
