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
    kHaveNone,  ///< for a file to be sealed, which no other mapping to write to may be left of
  };

  /// Throws ChannelError, with `what` in its text.
  WritablePages(int fd, size_t bytes, const std::string& what,
                Children children = Children::kMayRead);
  WritablePages(const WritablePages&) = delete;
  WritablePages& operator=(const WritablePages&) = delete;
  ~WritablePages();

  /// Null in a forked child that has none.
  std::byte* data() const { return data_; }
  /// False in a forked child.
  bool are_writable() const { return writable_; }
  /// For the child of a fork.
  void begin_in_child() noexcept;

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  Children children_;
  bool writable_ = true;
};

}  // namespace bls
