#include "host/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "errors.h"
#include "host/limits.h"

namespace bls {
namespace {

constexpr const char* kName = "torchrec_bls";  // in /proc/PID/maps
constexpr unsigned kNoExec = 8;                // MFD_NOEXEC_SEAL of Linux 6.3
constexpr unsigned kPagesOf2MiB = 21U << 26;   // MFD_HUGE_2MB
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

constexpr uint64_t kMebibyte = 1u << 20;
// In older kernels a signal ends the reservation of a piece, whose pages are lost then. Timers of
// profilers leave the time for a small one.
constexpr uint64_t kPiece = kMebibyte;
// The kernel itself holds pages for a moment: to move them together, or to see who uses them.
constexpr std::chrono::seconds kLongestHold{10};
constexpr std::chrono::milliseconds kPause{10};

bool out_of_descriptors() { return errno == EMFILE || errno == ENFILE; }

[[noreturn]] void no_memory(uint64_t bytes, uint64_t left, const MemoryPurpose& purpose) {
  throw ChannelError(ErrorKind::kRendezvous,
                     "no memory for " + purpose.what + ": " + mebibytes(bytes) + " needed, " +
                         std::to_string(left / kMebibyte) + " MiB left. " + purpose.cure +
                         ", or raise the limit of memory (in a "
                         "container --memory)");
}

int create_file(unsigned flags) {
  flags |= MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int fd = memfd_create(kName, flags | kNoExec);
  return fd < 0 && errno == EINVAL ? memfd_create(kName, flags) : fd;
}

/// Whether a descriptor that is open for nothing but this look may be opened at all: a device or a
/// pipe does something when it is, and a file with a name is none of ours.
bool is_memory_file(int fd, const MemoryFileAddress& address) {
  struct stat info {};
  return fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_nlink == 0 &&
         info.st_uid == geteuid() && info.st_dev == address.device && info.st_ino == address.inode;
}

[[noreturn]] void fail_open(const MemoryFileAddress& address) {
  const char* const condition = out_of_descriptors()
                                    ? ""
                                    : " (ranks must run as one user, in one PID namespace and one "
                                      "user namespace, alive)";
  fail_by_errno("cannot open shared memory of process " + std::to_string(address.pid) + condition);
}

[[noreturn]] void not_there(const MemoryFileAddress& address) {
  throw ChannelError(ErrorKind::kProtocol, "the shared memory announced by process " +
                                               std::to_string(address.pid) +
                                               " is not there any more: it restarted or closed");
}

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Descriptor duplicated(int fd) {
  Descriptor file(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (file.get() < 0) fail_by_errno("cannot keep a descriptor that was handed over");
  return file;
}

void check_memory_left(uint64_t bytes, const MemoryPurpose& purpose) {
  if (const uint64_t left = memory_left(bytes); left < bytes) no_memory(bytes, left, purpose);
}

Descriptor new_memory_file(const MemoryPurpose& purpose, bool from_pool) {
  Descriptor file(create_file(from_pool ? MFD_HUGETLB | kPagesOf2MiB : 0));
  if (file.get() < 0 && from_pool && !out_of_descriptors()) return file;
  if (file.get() < 0 || fchmod(file.get(), 0600) != 0) {
    fail_by_errno("cannot create shared memory for " + purpose.what);
  }
  return file;
}

void reserve_memory(int fd, uint64_t begin, uint64_t end, const MemoryPurpose& purpose) {
  for (uint64_t at = begin; at < end; at += kPiece) {
    int error;
    do {
      error = posix_fallocate(fd, static_cast<off_t>(at),
                              static_cast<off_t>(std::min(kPiece, end - at)));
    } while (error == EINTR);
    if (error == ENOSPC || error == ENOMEM) no_memory(end - at, memory_left(end - at), purpose);
    errno = error;
    if (error != 0) {
      fail_by_errno("cannot reserve " + mebibytes(end - at) + " of shared memory for " +
                    purpose.what);
    }
  }
}

Descriptor create_memory_file(uint64_t bytes, const MemoryPurpose& purpose) {
  check_memory_left(bytes, purpose);
  Descriptor file = new_memory_file(purpose);
  reserve_memory(file.get(), 0, bytes, purpose);
  return file;
}

void seal_memory_file(int fd, Seal seal, const MemoryPurpose& purpose) {
  int seals = kSizeSeals;
  if (seal == Seal::kLaterWriters) seals |= F_SEAL_FUTURE_WRITE;
  if (seal == Seal::kContents) seals |= F_SEAL_WRITE;
  const auto end = std::chrono::steady_clock::now() + kLongestHold;
  while (fcntl(fd, F_ADD_SEALS, seals) != 0) {
    // The kernel has waited 0.15 s for whoever holds a page.
    if (errno == EBUSY && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kPause);
    } else if (errno != EINTR) {
      fail_by_errno("cannot seal shared memory for " + purpose.what);
    }
  }
}

MemoryFileAddress address_of(int fd) {
  struct stat info {};
  if (fstat(fd, &info) != 0) fail_by_errno("cannot examine shared memory");
  return {static_cast<int32_t>(getpid()), fd, info.st_dev, info.st_ino,
          static_cast<uint64_t>(info.st_size)};
}

Descriptor open_memory_file(const MemoryFileAddress& address, bool writable) {
  const Descriptor there(
      ::open(("/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd)).c_str(),
             O_PATH | O_CLOEXEC));
  if (there.get() < 0) fail_open(address);
  if (!is_memory_file(there.get(), address)) not_there(address);
  Descriptor file(::open(("/proc/self/fd/" + std::to_string(there.get())).c_str(),
                         (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  if (file.get() < 0) fail_open(address);
  const Seal least = writable ? Seal::kSize : Seal::kLaterWriters;
  if (!is_sealed(file.get(), address.bytes, least)) not_there(address);
  return file;
}

bool is_sealed(int fd, uint64_t bytes, Seal seal) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) return false;
  int enough = F_SEAL_WRITE;
  if (seal == Seal::kLaterWriters) enough |= F_SEAL_FUTURE_WRITE;
  if (seal != Seal::kSize && (seals & enough) == 0) return false;
  struct stat info {};  // of now, when no process can change it
  return fstat(fd, &info) == 0 && static_cast<uint64_t>(info.st_size) == bytes;
}

std::string mebibytes(uint64_t bytes) {
  return std::to_string((bytes + kMebibyte - 1) / kMebibyte) + " MiB";
}

void fail_by_errno(const std::string& what) {
  const char* cure = "";
  if (out_of_descriptors()) cure = ". Raise the limit of open files (ulimit -n)";
  if (errno == EFBIG) cure = ". Raise the limit of a file's size (ulimit -f)";
  if (errno == EBUSY) cure = ": something holds pages of it. Try again";
  throw ChannelError(ErrorKind::kRendezvous, what + ": " + std::strerror(errno) + cure);
}

}  // namespace bls
