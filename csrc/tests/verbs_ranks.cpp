#include "verbs_ranks.h"

#include "transport_under_test.h"

namespace bls::testing {

std::vector<std::unique_ptr<VerbsTransport>> connected(const std::shared_ptr<Ibverbs>& library,
                                                       const Setup& setup,
                                                       const VerbsConfig& config) {
  std::vector<std::unique_ptr<VerbsTransport>> ranks;
  std::vector<VerbsAddress> addresses;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    const RingShape shape{rank, setup.world_size, setup.slot_count(), setup.slot_bytes};
    ranks.push_back(std::make_unique<VerbsTransport>(library, config, shape, setup.deadline));
    addresses.push_back(ranks.back()->address());
  }
  for (auto& rank : ranks) rank->connect(addresses);
  return ranks;
}

Transports verbs_transports(const Setup& setup) {
  VerbsConfig config;
  config.device = device_under_test();
  const auto library = config.device.empty() ? std::make_shared<FakeIbverbs>() : load_ibverbs();
  Transports transports;
  for (auto& rank : connected(library, setup, config)) transports.push_back(std::move(rank));
  return transports;
}

}  // namespace bls::testing
