#pragma once

#include <cstdint>
#include <string>

namespace bls {

/// What of a device is used and how. The defaults leave to the device what it can say itself.
struct VerbsConfig {
  std::string device;           ///< as ibv_devices names it; empty: the first with a usable port
  int port = 0;                 ///< from 1 on; 0: the first that is active
  int gid_index = -1;           ///< -1: chosen, see VerbsDevice
  int mtu = 0;                  ///< bytes of a packet; 0: the port's
  int traffic_class = 0;        ///< RoCE: DSCP << 2; selects the priority in lossless networks
  int service_level = 0;        ///< InfiniBand: selects the virtual lane
  int timeout = 14;             ///< an answer is awaited for 4.096 us << timeout, then sent again
  int retry_count = 6;          ///< how often; 7 would mean for ever to some devices
  int rnr_retry = 6;            ///< how often for a peer that has no receive; 7: for ever
  int min_rnr_timer = 12;       ///< how long such a peer is left alone (12: 0.64 ms)
  uint32_t inline_bytes = 256;  ///< messages up to this long travel within the request
};

}  // namespace bls
