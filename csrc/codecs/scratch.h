#pragma once

#include <cstddef>
#include <memory>

namespace bls {

/// Memory that is used again: fresh pages would cost more than what is written to them.
template <typename T>
class Scratch {
 public:
  /// So many items, of any value.
  T* of(size_t count) {
    if (count > capacity_) {
      items_ = std::make_unique_for_overwrite<T[]>(count);
      capacity_ = count;
    }
    return items_.get();
  }

 private:
  std::unique_ptr<T[]> items_;
  size_t capacity_ = 0;
};

}  // namespace bls
