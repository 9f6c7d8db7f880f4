#include <dlfcn.h>

#include <cerrno>
#include <string>

#include "errors.h"
#include "transport/verbs/device/ibverbs.h"

namespace bls {
namespace {

constexpr const char* kLibrary = "libibverbs.so.1";

/// Verbs on the data path are calls through the context, which need no symbol; the header's inline
/// functions for them are used as they are.
class LoadedIbverbs final : public Ibverbs {
 public:
  LoadedIbverbs() {
    void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw ChannelError(ErrorKind::kRendezvous,
                         "RDMA needs " + std::string(kLibrary) + ", which cannot be loaded (" +
                             dlerror() +
                             "). Install it: apt-get install libibverbs1 ibverbs-providers, or "
                             "dnf install libibverbs");
    }
    // Never unloaded: its providers start threads and register handlers.
    const auto find = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) {
        throw ChannelError(ErrorKind::kRendezvous, std::string(kLibrary) + " has no " + name +
                                                       ": install rdma-core 32 or later");
      }
    };
    find(fork_init_, "ibv_fork_init");
    find(get_device_list_, "ibv_get_device_list");
    find(free_device_list_, "ibv_free_device_list");
    find(get_device_name_, "ibv_get_device_name");
    find(open_device_, "ibv_open_device");
    find(close_device_, "ibv_close_device");
    find(query_device_, "ibv_query_device");
    find(query_port_, "ibv_query_port");
    find(query_gid_table_, "_ibv_query_gid_table");
    find(get_async_event_, "ibv_get_async_event");
    find(ack_async_event_, "ibv_ack_async_event");
    find(alloc_pd_, "ibv_alloc_pd");
    find(dealloc_pd_, "ibv_dealloc_pd");
    find(reg_mr_, "ibv_reg_mr");
    find(dereg_mr_, "ibv_dereg_mr");
    find(create_comp_channel_, "ibv_create_comp_channel");
    find(destroy_comp_channel_, "ibv_destroy_comp_channel");
    find(create_cq_, "ibv_create_cq");
    find(destroy_cq_, "ibv_destroy_cq");
    find(get_cq_event_, "ibv_get_cq_event");
    find(ack_cq_events_, "ibv_ack_cq_events");
    find(create_srq_, "ibv_create_srq");
    find(destroy_srq_, "ibv_destroy_srq");
    find(create_qp_, "ibv_create_qp");
    find(modify_qp_, "ibv_modify_qp");
    find(destroy_qp_, "ibv_destroy_qp");
  }

  int fork_init() override { return fork_init_(); }
  ibv_device** get_device_list(int* count) override { return get_device_list_(count); }
  void free_device_list(ibv_device** list) override { free_device_list_(list); }
  const char* get_device_name(ibv_device* device) override { return get_device_name_(device); }
  ibv_context* open_device(ibv_device* device) override { return open_device_(device); }
  int close_device(ibv_context* context) override { return close_device_(context); }
  int query_device(ibv_context* context, ibv_device_attr* attributes) override {
    return query_device_(context, attributes);
  }
  int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) override {
    *attributes = {};  // the exported function fills an older, shorter structure
    return query_port_(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attributes));
  }
  ssize_t query_gid_table(ibv_context* context, std::span<ibv_gid_entry> entries) override {
    return query_gid_table_(context, entries.data(), entries.size(), 0, sizeof(ibv_gid_entry));
  }
  int get_async_event(ibv_context* context, ibv_async_event* event) override {
    return get_async_event_(context, event);
  }
  void ack_async_event(ibv_async_event* event) override { ack_async_event_(event); }
  ibv_pd* alloc_pd(ibv_context* context) override { return alloc_pd_(context); }
  int dealloc_pd(ibv_pd* domain) override { return dealloc_pd_(domain); }
  ibv_mr* reg_mr(ibv_pd* domain, void* address, size_t bytes, int access) override {
    return reg_mr_(domain, address, bytes, access);
  }
  int dereg_mr(ibv_mr* memory) override { return dereg_mr_(memory); }
  ibv_comp_channel* create_comp_channel(ibv_context* context) override {
    return create_comp_channel_(context);
  }
  int destroy_comp_channel(ibv_comp_channel* channel) override {
    return destroy_comp_channel_(channel);
  }
  ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) override {
    return create_cq_(context, entries, nullptr, channel, 0);
  }
  int destroy_cq(ibv_cq* queue) override { return destroy_cq_(queue); }
  int req_notify_cq(ibv_cq* queue) override { return ibv_req_notify_cq(queue, 0); }
  int poll_cq(ibv_cq* queue, std::span<ibv_wc> completions) override {
    return ibv_poll_cq(queue, static_cast<int>(completions.size()), completions.data());
  }
  int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue) override {
    void* context = nullptr;
    return get_cq_event_(channel, queue, &context);
  }
  void ack_cq_events(ibv_cq* queue, unsigned events) override { ack_cq_events_(queue, events); }
  ibv_srq* create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) override {
    return create_srq_(domain, attributes);
  }
  int destroy_srq(ibv_srq* queue) override { return destroy_srq_(queue); }
  int post_srq_recv(ibv_srq* queue, ibv_recv_wr* chain, ibv_recv_wr** bad) override {
    return ibv_post_srq_recv(queue, chain, bad);
  }
  ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) override {
    return create_qp_(domain, attributes);
  }
  int modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) override {
    return modify_qp_(pair, attributes, mask);
  }
  int destroy_qp(ibv_qp* pair) override { return destroy_qp_(pair); }
  int post_send(ibv_qp* pair, ibv_send_wr* chain, ibv_send_wr** bad) override {
    return ibv_post_send(pair, chain, bad);
  }

 private:
  // Parenthesized where the header has a macro of the same name.
  decltype(&ibv_fork_init) fork_init_;
  decltype(&ibv_get_device_list) get_device_list_;
  decltype(&ibv_free_device_list) free_device_list_;
  decltype(&ibv_get_device_name) get_device_name_;
  decltype(&ibv_open_device) open_device_;
  decltype(&ibv_close_device) close_device_;
  decltype(&ibv_query_device) query_device_;
  decltype(&(ibv_query_port)) query_port_;
  decltype(&_ibv_query_gid_table) query_gid_table_;
  decltype(&ibv_get_async_event) get_async_event_;
  decltype(&ibv_ack_async_event) ack_async_event_;
  decltype(&ibv_alloc_pd) alloc_pd_;
  decltype(&ibv_dealloc_pd) dealloc_pd_;
  decltype(&(ibv_reg_mr)) reg_mr_;
  decltype(&ibv_dereg_mr) dereg_mr_;
  decltype(&ibv_create_comp_channel) create_comp_channel_;
  decltype(&ibv_destroy_comp_channel) destroy_comp_channel_;
  decltype(&ibv_create_cq) create_cq_;
  decltype(&ibv_destroy_cq) destroy_cq_;
  decltype(&ibv_get_cq_event) get_cq_event_;
  decltype(&ibv_ack_cq_events) ack_cq_events_;
  decltype(&ibv_create_srq) create_srq_;
  decltype(&ibv_destroy_srq) destroy_srq_;
  decltype(&ibv_create_qp) create_qp_;
  decltype(&ibv_modify_qp) modify_qp_;
  decltype(&ibv_destroy_qp) destroy_qp_;
};

}  // namespace

std::shared_ptr<Ibverbs> load_ibverbs() {
  static const auto library = std::make_shared<LoadedIbverbs>();
  return library;
}

}  // namespace bls
