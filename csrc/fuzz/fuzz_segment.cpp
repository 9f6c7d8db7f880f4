// The address of shared memory, as a rendezvous record or a pulled message has it.

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <limits>

#include "fuzz/input.h"
#include "transport/shm/shm_segment.h"

namespace bls::fuzzing {
namespace {

/// Descriptors of all kinds, of which a hostile address may name any.
std::array<int, 8> descriptors() {
  static const ShmSegment segment = ShmSegment::create(10000, "fuzzing");
  static const ShmSegment other = ShmSegment::create(4096, "fuzzing");
  std::array<int, 8> all{};
  all[0] = segment.address().fd;
  all[1] = other.address().fd;
  int pair[2];
  require(pipe2(pair, O_CLOEXEC) == 0, "pipe");
  all[2] = pair[0];
  all[3] = pair[1];
  all[4] = socket(AF_UNIX, SOCK_STREAM, 0);
  all[5] = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  all[6] = open("/dev/zero", O_RDWR | O_CLOEXEC);
  all[7] = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  return all;
}

int32_t take_process(Input& input) {
  // Never a number that another process may have: this must not open what belongs to others.
  constexpr int32_t kAboveAllProcesses = 1 << 22;
  const auto raw = input.take<int32_t>();
  switch (raw & 3) {
    case 0:
      return 0;
    case 1:
      return raw | std::numeric_limits<int32_t>::min();
    case 2:
      return (raw & std::numeric_limits<int32_t>::max()) | kAboveAllProcesses;
    default:
      return getpid();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::array<int, 8> known = descriptors();
  const int before = next_descriptor();
  Input input(data, size);
  SegmentAddress address;
  address.pid = take_process(input);
  const auto choice = input.take<uint8_t>();
  address.fd = choice & 0x80 ? input.take<int32_t>() : known[choice % known.size()];

  struct stat info {};
  const bool there = fstat(address.fd, &info) == 0;
  const auto wrong = input.take<uint8_t>();
  address.device = wrong & 1 ? input.take<uint64_t>() : info.st_dev;
  address.inode = wrong & 2 ? input.take<uint64_t>() : info.st_ino;
  address.bytes = wrong & 4 ? input.take<uint64_t>() : static_cast<uint64_t>(info.st_size);

  accepts([&] {
    const ShmSegment segment = ShmSegment::open(address);
    require(there && address.pid == getpid() && address.device == info.st_dev &&
                address.inode == info.st_ino &&
                address.bytes == static_cast<uint64_t>(info.st_size),
            "memory was opened that is not the announced one");
    touch({segment.data(), segment.size()});
  });
  require(next_descriptor() == before, "a descriptor was left open");
  return 0;
}

}  // namespace bls::fuzzing
