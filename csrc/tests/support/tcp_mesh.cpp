#include "tests/support/tcp_mesh.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "transport/mixed/mixed_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace bls::testing {
namespace {

void check(bool done, const char* what) {
  if (!done) throw std::runtime_error(what);
}

void limit_buffers(const Descriptor& of, int bytes) {
  if (bytes == 0) return;
  check(setsockopt(of.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes)) == 0, "SO_SNDBUF");
  check(setsockopt(of.get(), SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes)) == 0, "SO_RCVBUF");
}

}  // namespace

std::pair<Descriptor, Descriptor> tcp_pair(int buffer_bytes) {
  const Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  limit_buffers(listener, buffer_bytes);  // what it accepts inherits them
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  check(bind(listener.get(), any, length) == 0 && listen(listener.get(), 1) == 0 &&
            getsockname(listener.get(), any, &length) == 0,
        "no listener on the loopback interface");
  Descriptor caller(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  limit_buffers(caller, buffer_bytes);
  check(connect(caller.get(), any, length) == 0, "no connection on the loopback interface");
  Descriptor accepted(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  check(accepted.get() >= 0, "nothing to accept");
  return {std::move(caller), std::move(accepted)};
}

std::vector<std::vector<Descriptor>> tcp_sockets(int world_size, int buffer_bytes) {
  const auto ranks = static_cast<size_t>(world_size);
  std::vector<std::vector<Descriptor>> sockets(ranks);
  for (auto& of_rank : sockets) of_rank.resize(ranks);
  for (size_t high = 0; high < ranks; ++high) {
    for (size_t low = 0; low < high; ++low) {
      std::tie(sockets[high][low], sockets[low][high]) = tcp_pair(buffer_bytes);
    }
  }
  return sockets;
}

Transports tcp_transports(const Setup& setup, int buffer_bytes) {
  auto sockets = tcp_sockets(setup.world_size, buffer_bytes);
  Transports transports;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    const RingShape shape{rank, setup.world_size, setup.slot_count(), setup.slot_bytes};
    transports.push_back(std::make_unique<TcpTransport>(
        std::move(sockets[static_cast<size_t>(rank)]), shape, setup.deadline));
  }
  return transports;
}

Transports tcp_between_hosts(const Setup& setup) {
  constexpr int kRanksPerHost = 2;
  auto sockets = tcp_sockets(setup.world_size);
  Transports transports;
  for (int first = 0; first < setup.world_size; first += kRanksPerHost) {
    std::vector<int> local_ranks;
    const int end = std::min(first + kRanksPerHost, setup.world_size);
    for (int rank = first; rank < end; ++rank) local_ranks.push_back(rank);
    Setup host = setup;
    host.world_size = static_cast<int>(local_ranks.size());
    host.slots = setup.slot_count();
    auto shm = shm_mesh(host);
    for (const int rank : local_ranks) {
      auto& own = sockets[static_cast<size_t>(rank)];
      for (const int local : local_ranks) own[static_cast<size_t>(local)].close();
      const RingShape shape{rank, setup.world_size, setup.slot_count(), setup.slot_bytes};
      transports.push_back(std::make_unique<MixedTransport>(
          std::move(shm[static_cast<size_t>(rank - first)]),
          std::make_unique<TcpTransport>(std::move(own), shape, setup.deadline), local_ranks,
          setup.world_size));
    }
  }
  return transports;
}

}  // namespace bls::testing
