#pragma once

#include <cstddef>
#include <string>

namespace bls {

/// A whole memory file that the process which maps it may write to. A child that is forked later
/// may only read it: a store there would be one of a process that it is not.
class WritablePages {
 public:
  /// What a child that is forked later has.
  enum class Children {
    kMayRead,
    kHaveNone,  ///< for a file to be sealed, which no mapping to write to may be left of
  };

  /// Throws ChannelError, with `what` in its text.
  WritablePages(int fd, size_t bytes, const std::string& what,
                Children children = Children::kMayRead);
  WritablePages(const WritablePages&) = delete;
  WritablePages& operator=(const WritablePages&) = delete;
  ~WritablePages();

  std::byte* data() const { return data_; }
  /// False in a forked child.
  bool are_writable() const { return writable_; }
  /// For the child of a fork.
  void make_read_only() noexcept;

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  bool writable_ = true;
};

}  // namespace bls
