#pragma once

#include <memory>
#include <vector>

#include "fake_ibverbs.h"
#include "ranks.h"
#include "transport/verbs_transport.h"

namespace bls::testing {

/// Connected transports of all ranks over `library`, every rank with an opened device of its own.
std::vector<std::unique_ptr<VerbsTransport>> connected(const std::shared_ptr<Ibverbs>& library,
                                                       const Setup& setup,
                                                       const VerbsConfig& config = {});

/// Over the device under test, or over the fake.
Transports verbs_transports(const Setup& setup);

}  // namespace bls::testing
