#pragma once

#include <memory>
#include <vector>

#include "tests/support/ranks.h"
#include "tests/verbs/fake/fake_ibverbs.h"
#include "transport/verbs/verbs_transport.h"

namespace bls::testing {

/// All ranks but its own.
std::vector<int> others(const RingShape& shape);

/// Connected transports of all ranks over `library`, every rank with an opened device of its own.
/// `peers` says whom a rank connects to.
std::vector<std::unique_ptr<VerbsTransport>> connected(
    const std::shared_ptr<Ibverbs>& library, const Setup& setup, const VerbsConfig& config = {},
    const std::function<std::vector<int>(const RingShape&)>& peers = others);

/// Over the device under test, or over the fake.
Transports verbs_transports(const Setup& setup);
/// Shared memory among the ranks of a host, as above between hosts: `hosts` by rank, ascending.
Transports transports_on_hosts(const Setup& setup, const std::vector<int>& hosts);
/// With two ranks, or what remains, on each of several hosts.
Transports mixed_transports(const Setup& setup);

}  // namespace bls::testing
