#include "transport/verbs/device/verbs_device.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

#include "errors.h"

namespace bls {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw ChannelError(ErrorKind::kRendezvous, what);
}

const char* state_name(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "down";
    case IBV_PORT_INIT:
      return "initializing: an InfiniBand port waits for its subnet manager (opensm)";
    case IBV_PORT_ARMED:
      return "armed";
    case IBV_PORT_ACTIVE:
      return "active";
    case IBV_PORT_ACTIVE_DEFER:
      return "deferred";
    default:
      return "in an unknown state";
  }
}

bool ipv4_mapped(const ibv_gid& gid) {
  static constexpr uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kPrefix, sizeof(kPrefix)) == 0;
}

/// The devices of the host for as long as it lives.
class DeviceList {
 public:
  explicit DeviceList(Ibverbs& verbs) : verbs_(verbs), list_(verbs.get_device_list(&count_)) {}
  ~DeviceList() {
    if (list_ != nullptr) verbs_.free_device_list(list_);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;

  std::span<ibv_device*> devices() const {
    return {list_, list_ == nullptr ? size_t{0} : static_cast<size_t>(count_)};
  }

 private:
  Ibverbs& verbs_;
  int count_ = 0;
  ibv_device** list_;
};

}  // namespace

void verbs_failure(const VerbsDevice& device, const std::string& what) {
  refuse("RDMA device " + device.label() + ": " + what + ": " + std::strerror(errno));
}

VerbsDevice::VerbsDevice(std::shared_ptr<Ibverbs> verbs, const VerbsConfig& config)
    : verbs_(std::move(verbs)), config_(config) {
  if (const int error = verbs_->fork_init(); error != 0) fork_hazard_ = std::strerror(error);
  const DeviceList list(*verbs_);
  if (list.devices().empty()) {
    refuse(
        "this host has no RDMA device that libibverbs knows. See what there is with ibv_devices "
        "and "
        "`rdma link`; a device needs its kernel module, ib_uverbs and the package "
        "ibverbs-providers, and a container needs /dev/infiniband");
  }
  std::string present;
  std::string reasons;
  for (ibv_device* const device : list.devices()) {
    const std::string name = verbs_->get_device_name(device);
    present += (present.empty() ? "" : ", ") + name;
    if (!config.device.empty() && name != config.device) continue;
    config_ = config;
    config_.device = name;
    const std::string reason = open(device);
    if (reason.empty()) return;
    reasons += (reasons.empty() ? "" : "; ") + name + ": " + reason;
    context_.reset();
  }
  if (reasons.empty()) {
    refuse("there is no RDMA device " + config.device + " on this host, only " + present);
  }
  refuse("no RDMA device can be used: " + reasons);
}

std::string VerbsDevice::open(ibv_device* device) {
  context_ = {verbs_->open_device(device),
              [verbs = verbs_](ibv_context* context) { verbs->close_device(context); }};
  if (!context_) {
    const std::string file = "/dev/infiniband/" + std::string(device->dev_name);
    const int error = errno;
    // libibverbs goes on to look for the device elsewhere, and then only says that it is not there.
    const bool refused = access(file.c_str(), F_OK) == 0 && access(file.c_str(), R_OK | W_OK) != 0;
    if (refused || error == EACCES || error == EPERM) {
      return "no permission to open " + file +
             ": give the user read and write access to it (on most systems 0666, or the group "
             "rdma); a container needs --device=/dev/infiniband";
    }
    return "cannot open " + file + ": " + std::strerror(error);
  }
  if (const int error = verbs_->query_device(context_.get(), &limits_); error != 0) {
    return std::string("its limits cannot be queried: ") + std::strerror(error);
  }
  if (std::string reason = choose_port(); !reason.empty()) return reason;
  if (std::string reason = choose_gid(); !reason.empty()) return reason;
  domain_ = {verbs_->alloc_pd(context_.get()),
             [verbs = verbs_](ibv_pd* domain) { verbs->dealloc_pd(domain); }};
  return domain_ ? "" : std::string("no protection domain: ") + std::strerror(errno);
}

std::string VerbsDevice::choose_port() {
  if (config_.port > limits_.phys_port_cnt) {
    return "has no port " + std::to_string(config_.port) + ", only " +
           std::to_string(limits_.phys_port_cnt);
  }
  std::string reasons;
  const int first = config_.port > 0 ? config_.port : 1;
  const int last = config_.port > 0 ? config_.port : limits_.phys_port_cnt;
  for (int port = first; port <= last; ++port) {
    const int error =
        verbs_->query_port(context_.get(), static_cast<uint8_t>(port), &port_attributes_);
    if (error == 0 && port_attributes_.state == IBV_PORT_ACTIVE) {
      config_.port = port;
      return "";
    }
    reasons += (reasons.empty() ? "port " : ", port ") + std::to_string(port) +
               (error != 0 ? std::string(" cannot be queried: ") + std::strerror(error)
                           : std::string(" is ") + state_name(port_attributes_.state));
  }
  return reasons + ". Bring the link up (ip link set DEVICE up; rdma link shows the state)";
}

std::string VerbsDevice::choose_gid() {
  const bool roce = port_attributes_.link_layer == IBV_LINK_LAYER_ETHERNET;
  global_ = roce || config_.gid_index >= 0;
  if (!global_) return "";
  std::vector<ibv_gid_entry> entries(static_cast<size_t>(port_attributes_.gid_tbl_len) *
                                     limits_.phys_port_cnt);
  const ssize_t count = verbs_->query_gid_table(context_.get(), entries);
  if (count < 0) {
    return std::string("its GIDs cannot be read: ") + std::strerror(static_cast<int>(-count));
  }
  entries.resize(static_cast<size_t>(count));
  std::erase_if(entries, [&](const ibv_gid_entry& entry) {
    return static_cast<int>(entry.port_num) != config_.port;
  });
  const ibv_gid_entry* best = nullptr;
  int best_worth = 0;
  for (const ibv_gid_entry& entry : entries) {
    int worth = 1;
    if (config_.gid_index >= 0) {
      worth = static_cast<int>(entry.gid_index) == config_.gid_index ? 1 : 0;
    } else if (entry.gid_type == IBV_GID_TYPE_ROCE_V2) {
      worth = ipv4_mapped(entry.gid) ? 3 : 2;
    }
    if (worth > best_worth) {
      best = &entry;
      best_worth = worth;
    }
  }
  if (best == nullptr) {
    const std::string port = "port " + std::to_string(config_.port) + " has no GID";
    if (config_.gid_index >= 0) {
      return port + " at index " + std::to_string(config_.gid_index) +
             ": leave the index open, or see what there is with show_gids or ibv_devinfo -v";
    }
    return port + ": give its network interface an IP address (ip addr add)";
  }
  gid_ = best->gid;
  config_.gid_index = static_cast<int>(best->gid_index);
  return "";
}

uint32_t VerbsDevice::mtu() const {
  const uint32_t most = 128u << port_attributes_.active_mtu;
  return config_.mtu > 0 ? std::min(most, static_cast<uint32_t>(config_.mtu)) : most;
}

uint32_t VerbsDevice::max_message() const {
  constexpr uint32_t kLongest = 1u << 30;  // what a work request can have and stay addressable
  return port_attributes_.max_msg_sz == 0 ? kLongest
                                          : std::min(kLongest, port_attributes_.max_msg_sz);
}

std::string VerbsDevice::label() const {
  return config_.device + " port " + std::to_string(config_.port);
}

void VerbsDevice::require(const char* entries, size_t wanted, int most) const {
  if (wanted <= static_cast<size_t>(most)) return;
  refuse("RDMA device " + label() + " has queues of at most " + std::to_string(most) + " " +
         entries + ", and " + std::to_string(wanted) + " are needed: lower the bound");
}

bool VerbsDevice::port_active() const {
  ibv_port_attr attributes{};
  return verbs_->query_port(context_.get(), static_cast<uint8_t>(config_.port), &attributes) == 0 &&
         attributes.state == IBV_PORT_ACTIVE;
}

void VerbsDevice::keep_from_children() const {
  struct stat file {};
  if (fstat(context()->cmd_fd, &file) != 0) return;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t first = 0;
    uintptr_t end = 0;
    unsigned major_number = 0;
    unsigned minor_number = 0;
    uint64_t inode = 0;
    const int fields = std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %*s %*s %x:%x %" SCNu64,
                                   &first, &end, &major_number, &minor_number, &inode);
    if (fields == 5 && inode == file.st_ino && makedev(major_number, minor_number) == file.st_dev) {
      madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTFORK);
    }
  }
}

void VerbsDevice::abandon() const {
  for (const int fd : {context()->async_fd, context()->cmd_fd}) ::close(fd);
}

}  // namespace bls
