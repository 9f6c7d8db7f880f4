#include "transport/shm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.h"
#include "host/limits.h"

namespace bls {
namespace {

constexpr const char* kName = "torchrec_bls";  // in /proc/PID/maps
constexpr unsigned kNoExec = 8;                // MFD_NOEXEC_SEAL of Linux 6.3
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

constexpr uint64_t kMebibyte = 1u << 20;
// In older kernels a signal ends the reservation of a piece, whose pages are lost then. Timers of
// profilers leave the time for a small one.
constexpr uint64_t kPiece = kMebibyte;

std::string mebibytes(uint64_t bytes) {
  return std::to_string((bytes + kMebibyte - 1) / kMebibyte) + " MiB";
}

bool out_of_descriptors() { return errno == EMFILE || errno == ENFILE; }

[[noreturn]] void fail(const std::string& what) {
  const char* cure = "";
  if (out_of_descriptors()) cure = ". Raise the limit of open files (ulimit -n)";
  if (errno == EFBIG) cure = ". Raise the limit of a file's size (ulimit -f)";
  throw ChannelError(ErrorKind::kRendezvous, what + ": " + std::strerror(errno) + cure);
}

[[noreturn]] void no_memory(uint64_t bytes, uint64_t left, const std::string& purpose) {
  throw ChannelError(
      ErrorKind::kRendezvous,
      "no memory for " + purpose + ": " + mebibytes(bytes) + " needed, " +
          std::to_string(left / kMebibyte) +
          " MiB left. Lower the bound, slot_bytes or the batch, or raise the limit of memory (in a "
          "container --memory)");
}

/// A descriptor that is closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

int create_file() {
  const int fd = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExec);
  return fd < 0 && errno == EINVAL ? memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING) : fd;
}

/// Takes the memory of a whole file. Returns errno's value, 0 when it is there.
int reserve(int fd, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += kPiece) {
    int error;
    do {
      error = posix_fallocate(fd, static_cast<off_t>(at),
                              static_cast<off_t>(std::min(kPiece, bytes - at)));
    } while (error == EINTR);
    if (error != 0) return error;
  }
  return 0;
}

/// Whether a descriptor that is open for nothing but this look may be opened at all: a device or a
/// pipe does something when it is, and a file with a name is none of ours.
bool is_memory_file(int fd, const SegmentAddress& address) {
  struct stat info {};
  return fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_nlink == 0 &&
         info.st_uid == geteuid() && info.st_dev == address.device && info.st_ino == address.inode;
}

/// Whether the file has this size for good.
bool has_sealed_size(int fd, uint64_t bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat info {};  // of now, when no process can change it
  return seals >= 0 && (seals & kSeals) == kSeals && fstat(fd, &info) == 0 &&
         static_cast<uint64_t>(info.st_size) == bytes;
}

[[noreturn]] void fail_open(const SegmentAddress& address) {
  const char* const condition =
      out_of_descriptors() ? "" : " (ranks must run as one user, in one PID namespace, alive)";
  fail("cannot open shared memory of process " + std::to_string(address.pid) + condition);
}

[[noreturn]] void not_there(const SegmentAddress& address) {
  throw ChannelError(ErrorKind::kProtocol, "the shared memory announced by process " +
                                               std::to_string(address.pid) +
                                               " is not there any more: it restarted or closed");
}

}  // namespace

ShmSegment ShmSegment::create(size_t bytes, const std::string& purpose) {
  // Before it is taken: the kernel ends processes to find memory, and so does a control group.
  if (const uint64_t left = memory_left(bytes); left < bytes) no_memory(bytes, left, purpose);
  ShmSegment segment;
  segment.fd_ = create_file();
  if (segment.fd_ < 0 || fchmod(segment.fd_, 0600) != 0) {
    fail("cannot create shared memory for " + purpose);
  }
  if (const int error = reserve(segment.fd_, bytes); error != 0) {
    if (error == ENOSPC || error == ENOMEM) no_memory(bytes, memory_left(bytes), purpose);
    errno = error;
    fail("cannot reserve " + mebibytes(bytes) + " of shared memory for " + purpose);
  }
  struct stat info {};
  if (fcntl(segment.fd_, F_ADD_SEALS, kSeals) != 0 || fstat(segment.fd_, &info) != 0) {
    fail("cannot seal shared memory for " + purpose);
  }
  segment.address_ = {static_cast<int32_t>(getpid()), segment.fd_, info.st_dev, info.st_ino, bytes};
  segment.map(segment.fd_);
  return segment;
}

ShmSegment ShmSegment::open(const SegmentAddress& address) {
  const Descriptor there(
      ::open(("/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd)).c_str(),
             O_PATH | O_CLOEXEC));
  if (there.get() < 0) fail_open(address);
  if (!is_memory_file(there.get(), address)) not_there(address);
  const Descriptor file(
      ::open(("/proc/self/fd/" + std::to_string(there.get())).c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) fail_open(address);
  if (!has_sealed_size(file.get(), address.bytes)) not_there(address);
  ShmSegment segment;
  segment.address_ = address;
  segment.map(file.get());
  return segment;
}

void ShmSegment::map(int fd) {
  void* memory = mmap(nullptr, address_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) fail("cannot map " + mebibytes(address_.bytes) + " of shared memory");
  // A forked child would otherwise share the ring without being a rank of it.
  madvise(memory, address_.bytes, MADV_DONTFORK);
  data_ = static_cast<std::byte*>(memory);
}

void ShmSegment::close_descriptor() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

ShmSegment::ShmSegment(ShmSegment&& other) noexcept { *this = std::move(other); }

ShmSegment& ShmSegment::operator=(ShmSegment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(fd_, other.fd_);
  std::swap(address_, other.address_);
  return *this;
}

ShmSegment::~ShmSegment() {
  if (data_ != nullptr) munmap(data_, address_.bytes);
  close_descriptor();
}

}  // namespace bls
