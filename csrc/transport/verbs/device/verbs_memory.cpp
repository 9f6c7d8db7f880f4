#include "transport/verbs/device/verbs_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>

#include "errors.h"

namespace bls {
namespace {

constexpr size_t kMebibyte = size_t{1} << 20;

std::string mebibytes(size_t bytes) {
  return std::to_string((bytes + kMebibyte - 1) / kMebibyte) + " MiB";
}

[[noreturn]] void refuse_registration(const VerbsDevice& device, size_t bytes,
                                      const std::string& purpose) {
  const std::string what = "cannot register " + mebibytes(bytes) + " for " + purpose;
  rlimit limit{};
  const bool limited = getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  if ((errno == ENOMEM || errno == EPERM || errno == EAGAIN) && limited) {
    throw ChannelError(
        ErrorKind::kRendezvous,
        "RDMA device " + device.label() + ": " + what + ": the limit of locked memory is " +
            std::to_string(limit.rlim_cur / 1024) +
            " KiB (RLIMIT_MEMLOCK). Raise it: ulimit -l unlimited, memlock in "
            "/etc/security/limits.conf, LimitMEMLOCK=infinity of a systemd unit, or --ulimit "
            "memlock=-1 of a container. Or lower the bound, slot_bytes or the batch");
  }
  verbs_failure(device, what);
}

}  // namespace

VerbsMemory::VerbsMemory(const VerbsDevice& device, size_t bytes, int access,
                         const std::string& purpose) {
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) verbs_failure(device, "no " + mebibytes(bytes) + " for " + purpose);
  memory_ = {static_cast<std::byte*>(memory), Unmap{bytes}};
  // A forked child must not get pages that the device writes to, nor make the parent copy them.
  madvise(memory, bytes, MADV_DONTFORK);
  registration_ = {
      device.verbs().reg_mr(device.domain(), memory, bytes, access),
      [verbs = &device.verbs()](ibv_mr* registration) { verbs->dereg_mr(registration); }};
  if (!registration_) refuse_registration(device, bytes, purpose);
}

void VerbsMemory::Unmap::operator()(std::byte* memory) const { munmap(memory, bytes); }

}  // namespace bls
