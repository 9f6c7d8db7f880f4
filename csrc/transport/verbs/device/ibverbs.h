#pragma once

#include <infiniband/verbs.h>

#include <memory>
#include <span>

namespace bls {

/// The verbs that the transport uses, named and behaving as those of libibverbs: a null pointer or
/// a negative count with errno, or an errno value. Virtual, so that tests run without a device.
class Ibverbs {
 public:
  virtual ~Ibverbs() = default;

  /// Keeps what the device reads and writes usable when this process forks. Before the first device
  /// is opened; fails where another library has been using one.
  virtual int fork_init() = 0;
  virtual ibv_device** get_device_list(int* count) = 0;
  virtual void free_device_list(ibv_device** list) = 0;
  virtual const char* get_device_name(ibv_device* device) = 0;
  virtual ibv_context* open_device(ibv_device* device) = 0;
  virtual int close_device(ibv_context* context) = 0;
  virtual int query_device(ibv_context* context, ibv_device_attr* attributes) = 0;
  virtual int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) = 0;
  /// Valid GIDs of all ports. Returns how many there are.
  virtual ssize_t query_gid_table(ibv_context* context, std::span<ibv_gid_entry> entries) = 0;
  virtual int get_async_event(ibv_context* context, ibv_async_event* event) = 0;
  virtual void ack_async_event(ibv_async_event* event) = 0;

  virtual ibv_pd* alloc_pd(ibv_context* context) = 0;
  virtual int dealloc_pd(ibv_pd* domain) = 0;
  virtual ibv_mr* reg_mr(ibv_pd* domain, void* address, size_t bytes, int access) = 0;
  virtual int dereg_mr(ibv_mr* memory) = 0;

  virtual ibv_comp_channel* create_comp_channel(ibv_context* context) = 0;
  virtual int destroy_comp_channel(ibv_comp_channel* channel) = 0;
  virtual ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) = 0;
  virtual int destroy_cq(ibv_cq* queue) = 0;
  virtual int req_notify_cq(ibv_cq* queue) = 0;
  virtual int poll_cq(ibv_cq* queue, std::span<ibv_wc> completions) = 0;
  virtual int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue) = 0;
  virtual void ack_cq_events(ibv_cq* queue, unsigned events) = 0;

  virtual ibv_srq* create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) = 0;
  virtual int destroy_srq(ibv_srq* queue) = 0;
  virtual int post_srq_recv(ibv_srq* queue, ibv_recv_wr* chain, ibv_recv_wr** bad) = 0;

  virtual ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) = 0;
  virtual int modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) = 0;
  virtual int destroy_qp(ibv_qp* pair) = 0;
  virtual int post_send(ibv_qp* pair, ibv_send_wr* chain, ibv_send_wr** bad) = 0;
};

/// The host's libibverbs, loaded at the first call: whoever does not use it does not need it.
/// Throws ChannelError(kRendezvous) that says what to install.
std::shared_ptr<Ibverbs> load_ibverbs();

}  // namespace bls
