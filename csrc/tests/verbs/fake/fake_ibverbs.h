#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/payload.h"
#include "transport/verbs/device/ibverbs.h"

namespace bls::testing {

/// What a device of the fake says of itself.
struct FakeDevice {
  std::string name = "fake0";
  std::vector<ibv_port_state> ports{IBV_PORT_ACTIVE};
  uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  std::vector<ibv_gid_entry> gids;  ///< empty: link-local and IPv4, as RoCE devices have them
  int open_error = 0;               ///< errno of open_device
  int register_error = 0;           ///< errno of reg_mr
  int create_error = 0;             ///< errno of create_qp
  int connect_error = 0;            ///< what modify_qp returns where it connects
  int fork_error = 0;               ///< what fork_init returns, of any device
  int max_qp_wr = 4096;
  int max_srq_wr = 4096;
  int max_cqe = 1 << 20;
  uint32_t max_message = 1u << 20;
  uint32_t max_inline = 64;
};

/// Reliable connections among the ranks of one process, with what a real network does and tests
/// must survive: requests of different connections overtake each other, data arrive long before
/// their sender learns of it, polls return fewer completions than there are. A thread of its own
/// moves the data, so that sanitizers see memory that is touched too early. Where a device may
/// behave in any way (a queue that overflows, memory that is not registered), the fake fails
/// loudly.
class FakeIbverbs final : public Ibverbs {
 public:
  explicit FakeIbverbs(std::vector<FakeDevice> devices = {FakeDevice{}}, uint64_t seed = 1);
  ~FakeIbverbs() override;

  /// The next request of a queue pair fails with `status`.
  void fail_next(uint32_t queue_pair, ibv_wc_status status);
  enum class Call { kPostSend, kPostReceive, kPoll };
  /// The next such call on a device fails. Of a chain all requests but the last are taken.
  void refuse_next(ibv_context* context, Call call);
  /// Nothing of the queue pair moves until it is let go.
  void hold(uint32_t queue_pair, bool held);
  /// As if the process that opened the device were gone: nobody answers.
  void kill(ibv_context* context);
  void set_port_state(ibv_context* context, ibv_port_state state);
  void raise(ibv_context* context, ibv_event_type type, uint32_t queue_pair = 0);
  /// Pretends that a peer wrote with notification: a receive completes on `queue_pair`.
  void forge_arrival(uint32_t queue_pair, uint32_t immediate);
  /// Runs `interference` when the events of a device are read the next time.
  void at_next_look_for_events(ibv_context* context, std::function<void()> interference);
  /// Most requests that were in a send queue at any time.
  int fullest_send_queue();

  int fork_init() override;
  ibv_device** get_device_list(int* count) override;
  void free_device_list(ibv_device** list) override;
  const char* get_device_name(ibv_device* device) override;
  ibv_context* open_device(ibv_device* device) override;
  int close_device(ibv_context* context) override;
  int query_device(ibv_context* context, ibv_device_attr* attributes) override;
  int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) override;
  ssize_t query_gid_table(ibv_context* context, std::span<ibv_gid_entry> entries) override;
  int get_async_event(ibv_context* context, ibv_async_event* event) override;
  void ack_async_event(ibv_async_event* event) override;
  ibv_pd* alloc_pd(ibv_context* context) override;
  int dealloc_pd(ibv_pd* domain) override;
  ibv_mr* reg_mr(ibv_pd* domain, void* address, size_t bytes, int access) override;
  int dereg_mr(ibv_mr* memory) override;
  ibv_comp_channel* create_comp_channel(ibv_context* context) override;
  int destroy_comp_channel(ibv_comp_channel* channel) override;
  ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) override;
  int destroy_cq(ibv_cq* queue) override;
  int req_notify_cq(ibv_cq* queue) override;
  int poll_cq(ibv_cq* queue, std::span<ibv_wc> completions) override;
  int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue) override;
  void ack_cq_events(ibv_cq* queue, unsigned events) override;
  ibv_srq* create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) override;
  int destroy_srq(ibv_srq* queue) override;
  int post_srq_recv(ibv_srq* queue, ibv_recv_wr* chain, ibv_recv_wr** bad) override;
  ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) override;
  int modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) override;
  int destroy_qp(ibv_qp* pair) override;
  int post_send(ibv_qp* pair, ibv_send_wr* chain, ibv_send_wr** bad) override;

 private:
  struct Context;
  struct Memory;
  struct Channel;
  struct Completions;
  struct Receives;
  struct Pair;
  struct Request;

  void run();
  bool step();
  void execute(Pair& pair);
  ibv_wc_status execute(Pair& pair, const Request& request);
  void complete(Pair& pair, const Request& request, ibv_wc_status status);
  void break_pair(Pair& pair);
  void push(Completions& queue, const ibv_wc& completion, int frees);
  const Memory* find(ibv_context* context, uint32_t key, uint64_t address, uint64_t bytes,
                     int access) const;
  Pair* find_pair(uint32_t number);

  std::mutex mutex_;
  std::condition_variable work_;
  bool stopping_ = false;
  std::atomic<bool> fork_prepared_{false};
  Random random_;
  std::vector<FakeDevice> settings_;
  std::vector<ibv_device> devices_;
  std::map<uint32_t, Pair*> pairs_;
  std::map<uint32_t, Memory*> memories_;  // by key
  uint32_t next_number_ = 100;
  int fullest_ = 0;
  std::thread network_;
};

}  // namespace bls::testing
