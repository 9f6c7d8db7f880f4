#pragma once

#include <string>

namespace bls::testing {

/// What the tests of the protocol run over: the environment variable TORCHREC_BLS_TEST_TRANSPORT,
/// one of "shm", "heap", "tcp", "tcp_between_hosts", "verbs" and "mixed". Without it, "verbs" if
/// TORCHREC_BLS_TEST_DEVICE names a device, else "shm". Without a device "verbs" and "mixed" use
/// the fake.
std::string transport_under_test();
/// The device that TORCHREC_BLS_TEST_DEVICE names, or nothing.
std::string device_under_test();
/// The device of a rank that is a process: the one under test, or for odd ranks the one that
/// TORCHREC_BLS_TEST_PEER_DEVICE names, which a link joins with it.
std::string device_of(int rank);
/// The network device below the link between these two, which a test may take down: the one that
/// TORCHREC_BLS_TEST_LINK names, or nothing.
std::string link_under_test();
/// Makes `Ranks` use that transport.
void choose_transport();

}  // namespace bls::testing
