#include "tests/support/transport_under_test.h"

#include <cstdlib>
#include <stdexcept>

#include "tests/support/ranks.h"
#include "tests/support/tcp_mesh.h"
#ifdef BLS_WITH_VERBS
#include "tests/verbs/verbs_ranks.h"
#endif

namespace bls::testing {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

std::string device_under_test() { return variable("TORCHREC_BLS_TEST_DEVICE"); }

std::string device_of(int rank) {
  const std::string peer = variable("TORCHREC_BLS_TEST_PEER_DEVICE");
  return rank % 2 == 0 || peer.empty() ? device_under_test() : peer;
}

std::string link_under_test() { return variable("TORCHREC_BLS_TEST_LINK"); }

std::string transport_under_test() {
  const std::string transport = variable("TORCHREC_BLS_TEST_TRANSPORT");
  if (!transport.empty()) return transport;
  return device_under_test().empty() ? "shm" : "verbs";
}

void choose_transport() {
  const std::string transport = transport_under_test();
  if (transport == "heap") {
    default_transports() = heap_transports;
  } else if (transport == "tcp") {
    default_transports() = [](const Setup& setup) { return tcp_transports(setup); };
  } else if (transport == "tcp_between_hosts") {
    default_transports() = tcp_between_hosts;
#ifdef BLS_WITH_VERBS
  } else if (transport == "verbs") {
    default_transports() = verbs_transports;
  } else if (transport == "mixed") {
    default_transports() = mixed_transports;
#endif
  } else if (transport != "shm") {
    throw std::invalid_argument("there is no transport " + transport + " to test");
  }
}

}  // namespace bls::testing
