#pragma once

#include <utility>
#include <vector>

#include "host/memory_file.h"
#include "tests/support/ranks.h"

namespace bls::testing {

/// Both ends of a connection over the loopback interface. `buffer_bytes` is what the kernel keeps
/// in each direction at most, or 0 for what it chooses.
std::pair<Descriptor, Descriptor> tcp_pair(int buffer_bytes = 0);

/// [rank][peer]: connections of all ranks with each other.
std::vector<std::vector<Descriptor>> tcp_sockets(int world_size, int buffer_bytes = 0);

/// Transports over such connections.
Transports tcp_transports(const Setup& setup, int buffer_bytes = 0);
/// Two ranks on each host share memory, and TCP joins the hosts.
Transports tcp_between_hosts(const Setup& setup);

}  // namespace bls::testing
