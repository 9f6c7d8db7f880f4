#pragma once

#include <memory>
#include <stdexcept>
#include <utility>

#include "transport/transport.h"

namespace bls {

/// Owns a transport until a channel, or a transport that is made of it, takes it over.
class TransportHandle {
 public:
  virtual ~TransportHandle() = default;
  virtual std::unique_ptr<Transport> take() = 0;
};

template <class T>
class Handle final : public TransportHandle {
 public:
  explicit Handle(std::unique_ptr<T> transport) : transport_(std::move(transport)) {}

  T& get() const {
    if (!transport_) throw std::invalid_argument("the transport belongs to a channel already");
    return *transport_;
  }
  std::unique_ptr<T> take_own() {
    get();
    return std::move(transport_);
  }
  std::unique_ptr<Transport> take() override { return take_own(); }

 private:
  std::unique_ptr<T> transport_;
};

}  // namespace bls
