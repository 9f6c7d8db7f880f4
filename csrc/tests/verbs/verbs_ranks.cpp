#include "tests/verbs/verbs_ranks.h"

#include <algorithm>
#include <utility>

#include "tests/support/transport_under_test.h"
#include "transport/mixed/mixed_transport.h"

namespace bls::testing {
namespace {

constexpr int kRanksPerHost = 2;

std::pair<std::shared_ptr<Ibverbs>, VerbsConfig> library_under_test() {
  VerbsConfig config;
  config.device = device_under_test();
  if (config.device.empty()) return {std::make_shared<FakeIbverbs>(), config};
  return {load_ibverbs(), config};
}

}  // namespace

std::vector<int> others(const RingShape& shape) {
  std::vector<int> peers;
  for (int rank = 0; rank < shape.world_size; ++rank) {
    if (rank != shape.rank) peers.push_back(rank);
  }
  return peers;
}

std::vector<std::unique_ptr<VerbsTransport>> connected(
    const std::shared_ptr<Ibverbs>& library, const Setup& setup, const VerbsConfig& config,
    const std::function<std::vector<int>(const RingShape&)>& peers) {
  std::vector<std::unique_ptr<VerbsTransport>> ranks;
  std::vector<VerbsAddress> addresses;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    const RingShape shape{rank, setup.world_size, setup.slot_count(), setup.slot_bytes};
    ranks.push_back(
        std::make_unique<VerbsTransport>(library, config, shape, setup.deadline, peers(shape)));
    addresses.push_back(ranks.back()->address());
  }
  for (auto& rank : ranks) rank->connect(addresses);
  return ranks;
}

Transports verbs_transports(const Setup& setup) {
  const auto [library, config] = library_under_test();
  Transports transports;
  for (auto& rank : connected(library, setup, config)) transports.push_back(std::move(rank));
  return transports;
}

Transports transports_on_hosts(const Setup& setup, const std::vector<int>& hosts) {
  const auto host_of = [&](int rank) { return hosts[static_cast<size_t>(rank)]; };
  const auto [library, config] = library_under_test();
  const auto elsewhere = [&](const RingShape& shape) {
    std::vector<int> peers = others(shape);
    std::erase_if(peers, [&](int peer) { return host_of(peer) == host_of(shape.rank); });
    return peers;
  };
  auto verbs = connected(library, setup, config, elsewhere);
  Transports transports;
  for (int first = 0; first < setup.world_size;) {
    std::vector<int> local_ranks;
    for (int rank = first; rank < setup.world_size && host_of(rank) == host_of(first); ++rank) {
      local_ranks.push_back(rank);
    }
    Setup host = setup;
    host.world_size = static_cast<int>(local_ranks.size());
    host.slots = setup.slot_count();
    auto shm = shm_mesh(host);
    for (const int rank : local_ranks) {
      transports.push_back(std::make_unique<MixedTransport>(
          std::move(shm[static_cast<size_t>(rank - first)]),
          std::move(verbs[static_cast<size_t>(rank)]), local_ranks, setup.world_size));
    }
    first += host.world_size;
  }
  return transports;
}

Transports mixed_transports(const Setup& setup) {
  std::vector<int> hosts;
  for (int rank = 0; rank < setup.world_size; ++rank) hosts.push_back(rank / kRanksPerHost);
  return transports_on_hosts(setup, hosts);
}

}  // namespace bls::testing
