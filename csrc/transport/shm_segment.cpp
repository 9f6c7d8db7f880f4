#include "transport/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.h"

namespace bls {
namespace {

constexpr const char* kDirectory = "/dev/shm";

constexpr uint64_t kMebibyte = 1u << 20;

std::string mebibytes(uint64_t bytes) {
  return std::to_string((bytes + kMebibyte - 1) / kMebibyte) + " MiB";
}

bool out_of_descriptors() { return errno == EMFILE || errno == ENFILE; }

[[noreturn]] void fail(const std::string& what) {
  const char* const cure =
      out_of_descriptors() ? ". Raise the limit of open files (ulimit -n)" : "";
  throw ChannelError(ErrorKind::kRendezvous, what + ": " + std::strerror(errno) + cure);
}

[[noreturn]] void no_space(uint64_t bytes, const std::string& purpose) {
  struct statvfs fs {};
  const uint64_t free_bytes =
      statvfs(kDirectory, &fs) == 0 ? uint64_t{fs.f_bavail} * fs.f_frsize : 0;
  throw ChannelError(ErrorKind::kRendezvous,
                     "no space in " + std::string(kDirectory) + " for " + purpose + ": " +
                         mebibytes(bytes) + " needed, " + std::to_string(free_bytes / kMebibyte) +
                         " MiB free. Lower the bound, slot_bytes or the batch, or enlarge it "
                         "(mount -o remount,size=... /dev/shm; in a container --shm-size)");
}

}  // namespace

ShmSegment ShmSegment::create(size_t bytes, const std::string& purpose) {
  ShmSegment segment;
  segment.fd_ = ::open(kDirectory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (segment.fd_ < 0) {
    fail("cannot create shared memory in " + std::string(kDirectory) + " for " + purpose);
  }
  if (const int error = posix_fallocate(segment.fd_, 0, static_cast<off_t>(bytes)); error != 0) {
    if (error == ENOSPC || error == EFBIG) no_space(bytes, purpose);
    errno = error;
    fail("cannot reserve " + mebibytes(bytes) + " of shared memory for " + purpose);
  }
  struct stat info {};
  if (fstat(segment.fd_, &info) != 0) fail("cannot stat shared memory for " + purpose);
  segment.address_ = {static_cast<int32_t>(getpid()), segment.fd_, info.st_dev, info.st_ino, bytes};
  segment.map(segment.fd_);
  return segment;
}

ShmSegment ShmSegment::open(const SegmentAddress& address) {
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    const char* const condition =
        out_of_descriptors() ? "" : " (ranks must run as one user, in one PID namespace, alive)";
    fail("cannot open shared memory of process " + std::to_string(address.pid) + condition);
  }
  struct stat info {};
  const bool same = fstat(fd, &info) == 0 && info.st_dev == address.device &&
                    info.st_ino == address.inode &&
                    static_cast<uint64_t>(info.st_size) == address.bytes;
  ShmSegment segment;
  segment.address_ = address;
  if (same) {
    try {
      segment.map(fd);
    } catch (...) {
      ::close(fd);
      throw;
    }
  }
  ::close(fd);
  if (!same) {
    throw ChannelError(ErrorKind::kProtocol, "the shared memory announced by process " +
                                                 std::to_string(address.pid) +
                                                 " is not there any more: it restarted or closed");
  }
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
