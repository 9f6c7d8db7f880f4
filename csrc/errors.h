#pragma once

#include <stdexcept>
#include <string>

namespace bls {

/// What went wrong between ranks. A caller's own mistakes are std::invalid_argument instead.
enum class ErrorKind {
  kTimeout,   ///< a peer did not arrive by the deadline
  kPeerDied,  ///< a peer's process is gone
  kPeerClosed,
  kProtocol,  ///< what a peer wrote contradicts what both agreed on
  kPoisoned,  ///< another rank failed first and said so
  kRendezvous,
  kClosed,     ///< this rank closed the channel
  kTransport,  ///< the network below the channel failed, and not by the end of a peer
};

/// An error of the run: one rank, one peer, one sequence number.
class ChannelError : public std::runtime_error {
 public:
  ChannelError(ErrorKind kind, const std::string& message)
      : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

/// Ends a call of a channel for a reason outside of it, a signal for instance. The channel fails on
/// all ranks with the text, and what was thrown is passed on to the caller.
class Interruption : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace bls
