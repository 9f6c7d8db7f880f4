#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace bls {

/// Large blocks of memory that are used again. A fresh page costs a fault and its zeroing, which
/// for an output of megabytes takes longer than writing it; malloc gives such pages back to the
/// system, some of the time. Blocks lie on pages of 2 MiB where the system has them for whoever
/// asks (transparent_hugepage is madvise or always).
///
/// Threads may share a pool.
class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  /// One user's memory, until it is destroyed. It keeps the pool alive.
  class Block {
   public:
    Block(Block&& other) noexcept;
    Block& operator=(Block&&) = delete;
    ~Block();

    std::byte* data() const { return data_; }
    size_t bytes() const { return bytes_; }

   private:
    friend class PagePool;
    Block(std::shared_ptr<PagePool> pool, std::byte* data, size_t bytes, size_t capacity)
        : pool_(std::move(pool)), data_(data), bytes_(bytes), capacity_(capacity) {}

    std::shared_ptr<PagePool> pool_;
    std::byte* data_;
    size_t bytes_;     ///< that were asked for
    size_t capacity_;  ///< that there are
  };

  /// `unused` is how many blocks are kept for later users; the smallest goes first.
  static std::shared_ptr<PagePool> make(size_t unused) {
    return std::shared_ptr<PagePool>(new PagePool(unused));
  }
  ~PagePool();

  /// Uninitialized memory. Throws std::bad_alloc.
  Block take(size_t bytes);

 private:
  struct Memory {
    std::byte* data;
    size_t bytes;
  };

  explicit PagePool(size_t unused) : most_unused_(unused) { unused_.reserve(unused + 1); }
  void give_back(Memory memory) noexcept;

  size_t most_unused_;
  std::mutex mutex_;
  std::vector<Memory> unused_;
};

}  // namespace bls
