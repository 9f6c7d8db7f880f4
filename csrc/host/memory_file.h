#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bls {

/// How another process of the same user finds a memory file: by its creator's descriptor table. The
/// device and inode tell a recycled process or descriptor number from the real one.
struct MemoryFileAddress {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
};

/// A descriptor that is closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }

  int get() const { return fd_; }
  void close();

 private:
  int fd_;
};

/// A descriptor of the same file. The given one stays its owner's: nobody has to say when it
/// changed hands. Throws ChannelError.
Descriptor duplicated(int fd);

/// What a memory file is for, in words for messages.
struct MemoryPurpose {
  std::string what;  ///< "shared memory for ..."
  std::string cure;  ///< what to lower where there is not enough
};

/// Throws ChannelError if the host or a control group has less memory left. Before it is taken: the
/// kernel ends processes to find memory.
void check_memory_left(uint64_t bytes, const MemoryPurpose& purpose);

/// Creates a memory file of mode 0600 without a byte. With `from_pool` its pages are the host's of
/// 2 MiB (hugetlb), and it is none where there are none. Throws ChannelError.
Descriptor new_memory_file(const MemoryPurpose& purpose, bool from_pool = false);

/// Takes the memory of a part of a file, zeroed where there was none. Throws ChannelError.
void reserve_memory(int fd, uint64_t begin, uint64_t end, const MemoryPurpose& purpose);

/// Creates shared memory without a name: a memory file of mode 0600, so there is nothing to unlink,
/// to guess, or to leave behind after SIGKILL. Reserves `bytes` (zeroed) at once, so that a lack of
/// memory is an error here and not a SIGBUS later. Throws ChannelError.
Descriptor create_memory_file(uint64_t bytes, const MemoryPurpose& purpose);

/// What nobody can change any more about a memory file, for good. Each includes the ones before.
enum class Seal {
  kSize,          ///< its size: no process can cut off what others have mapped
  kLaterWriters,  ///< who may write to it: those that have it mapped to write to by now
  kContents,      ///< its contents
};

/// Seals a memory file. For its contents, who holds a page meanwhile is waited for, for seconds.
/// Throws ChannelError.
void seal_memory_file(int fd, Seal seal, const MemoryPurpose& purpose);

/// The address of a file of this process. Throws ChannelError.
MemoryFileAddress address_of(int fd);

/// Opens a sealed memory file of another process (or of this one), against later writers unless it
/// is opened to be written to. Nothing else that the address may name is opened. Throws
/// ChannelError.
Descriptor open_memory_file(const MemoryFileAddress& address, bool writable);

/// Whether a descriptor is of a memory file of this size, sealed at least so.
bool is_sealed(int fd, uint64_t bytes, Seal seal);

/// Bytes as a number of MiB, rounded up.
std::string mebibytes(uint64_t bytes);

/// Throws ChannelError with the text, errno's, and the cure for some of its values.
[[noreturn]] void fail_by_errno(const std::string& what);

}  // namespace bls
