#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "transport/verbs/device/ibverbs.h"
#include "transport/verbs/device/verbs_config.h"

namespace bls {

/// An object of the library with what gives it back.
template <class T>
using VerbsHandle = std::unique_ptr<T, std::function<void(T*)>>;

/// An opened device, one of its ports and a protection domain.
///
/// The port is the configured one, else the first active of the first device that can be opened.
/// The GID of a RoCE port is the configured one, else the first that is RoCE v2 and IPv4-mapped,
/// else the first that is RoCE v2: those are routed. On InfiniBand ranks find each other by LID.
class VerbsDevice {
 public:
  /// Throws ChannelError(kRendezvous) that says for each device why it cannot be used.
  VerbsDevice(std::shared_ptr<Ibverbs> verbs, const VerbsConfig& config);

  Ibverbs& verbs() const { return *verbs_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* domain() const { return domain_.get(); }
  const ibv_device_attr& limits() const { return limits_; }
  const ibv_port_attr& port_attributes() const { return port_attributes_; }
  const VerbsConfig& config() const { return config_; }  ///< as chosen: nothing is left open in it
  const ibv_gid& gid() const { return gid_; }
  /// Whether packets carry a global route header: always on RoCE.
  bool global() const { return global_; }
  /// Bytes of a packet: what the port can, or less where it is configured so.
  uint32_t mtu() const;
  /// Of a message: a device may say more than it can count.
  uint32_t max_message() const;
  /// For error texts: "mlx5_0 port 1".
  std::string label() const;
  /// Throws ChannelError(kRendezvous) where a queue needs more entries than the device has.
  void require(const char* entries, size_t wanted, int most) const;
  /// Whether the port has a link right now.
  bool port_active() const;

  /// Why a fork is dangerous for what the device reads and writes; empty if it is not.
  const std::string& fork_hazard() const { return fork_hazard_; }
  /// Makes forked children inherit nothing that the device has mapped so far. Connections live as
  /// long as anybody has such a mapping, and peers would not notice that this process has ended.
  void keep_from_children() const;
  /// For a forked child: gives back its descriptors. The library must not, which would take the
  /// parent's connections down.
  void abandon() const;

 private:
  std::string open(ibv_device* device);
  std::string choose_port();
  std::string choose_gid();

  std::shared_ptr<Ibverbs> verbs_;
  VerbsConfig config_;
  VerbsHandle<ibv_context> context_;
  VerbsHandle<ibv_pd> domain_;
  ibv_device_attr limits_{};
  ibv_port_attr port_attributes_{};
  ibv_gid gid_{};
  bool global_ = false;
  std::string fork_hazard_;
};

/// `what` and errno's text as ChannelError(kRendezvous).
[[noreturn]] void verbs_failure(const VerbsDevice& device, const std::string& what);

}  // namespace bls
