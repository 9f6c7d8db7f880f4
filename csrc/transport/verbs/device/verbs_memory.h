#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "transport/verbs/device/verbs_device.h"

namespace bls {

/// Zeroed memory that the device may read and write, and peers as `access` says.
class VerbsMemory {
 public:
  VerbsMemory() = default;
  /// `purpose` goes into the error message.
  VerbsMemory(const VerbsDevice& device, size_t bytes, int access, const std::string& purpose);
  VerbsMemory(VerbsMemory&& other) noexcept = default;
  VerbsMemory& operator=(VerbsMemory&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(registration_, other.registration_);
    return *this;
  }

  std::byte* data() const { return memory_.get(); }
  size_t size() const { return memory_ ? memory_.get_deleter().bytes : 0; }
  uint32_t local_key() const { return registration_->lkey; }
  uint32_t remote_key() const { return registration_->rkey; }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* memory) const;
  };

  std::unique_ptr<std::byte, Unmap> memory_;
  VerbsHandle<ibv_mr> registration_;  // goes before the memory
};

}  // namespace bls
