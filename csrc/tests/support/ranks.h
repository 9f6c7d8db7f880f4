#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "channel/channel.h"
#include "errors.h"
#include "transport/shm/shm_transport.h"

namespace bls::testing {

/// One channel as all its ranks see it.
struct Setup {
  int world_size = 2;
  uint32_t bound = 0;
  uint32_t slots = 0;  ///< 0: the 2(bound + 1) that never wait
  size_t slot_bytes = 4096;
  std::chrono::milliseconds deadline{60000};
  Interrupt interrupt{};  ///< of rank 0

  uint32_t slot_count() const { return slots != 0 ? slots : 2 * (bound + 1); }
};

/// By rank.
using Transports = std::vector<std::unique_ptr<Transport>>;

/// Transports of ranks that share memory, connected.
std::vector<std::unique_ptr<ShmTransport>> shm_mesh(const Setup& setup);
Transports shm_transports(const Setup& setup);
/// Transports whose memory accesses a thread sanitizer understands.
Transports heap_transports(const Setup& setup);

using MakeTransports = std::function<Transports(const Setup&)>;
/// What `Ranks` uses where a test names nothing: shared memory unless the program says otherwise.
MakeTransports& default_transports();

/// What a rank threw. `kind` is empty for std::invalid_argument and everything foreign.
struct Failure {
  std::optional<ErrorKind> kind;
  std::string message;
};

/// The ranks of one channel, each to be run by its own thread.
class Ranks {
 public:
  Ranks(const Setup& setup, Transports transports);
  explicit Ranks(const Setup& setup) : Ranks(setup, default_transports()(setup)) {}

  Channel& operator[](int rank) { return *channels_[static_cast<size_t>(rank)]; }
  /// The transport below a rank's channel, to damage what it delivers.
  Transport& transport(int rank) { return *transports_[static_cast<size_t>(rank)]; }
  /// The slot of message `sequence` from `source` at `rank`, once it is there.
  std::byte* arrived(int rank, int source, uint64_t sequence);
  int world_size() const { return static_cast<int>(channels_.size()); }

  using Body = std::function<void(int rank, Channel& channel)>;
  /// Runs `body` on all ranks at once and returns what each threw.
  std::vector<std::optional<Failure>> outcomes(const Body& body);
  /// Runs `body` on all ranks at once. Throws std::runtime_error with the text of each failure.
  void run(const Body& body);

 private:
  std::vector<Transport*> transports_;
  std::vector<std::unique_ptr<Channel>> channels_;
};

/// Runs `body` and returns what it threw.
std::optional<Failure> failure_of(const std::function<void()>& body);

/// For the threads of ranks, where doctest's assertions must not throw.
void expect(bool condition, const std::string& what);

}  // namespace bls::testing
