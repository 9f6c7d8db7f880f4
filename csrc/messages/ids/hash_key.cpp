#include "messages/ids/hash_key.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <system_error>

namespace bls {
namespace {

HashKey draw_key() {
  std::array<uint64_t, 3> numbers;
  // So few bytes come at once or not at all, but for a signal before the system's pool is ready.
  while (getrandom(numbers.data(), sizeof numbers, 0) != sizeof numbers) {
    if (errno == EINTR) continue;
    throw std::system_error(errno, std::generic_category(), "getrandom for a key of hashes");
  }
  return {numbers[0], numbers[1], numbers[2]};
}

}  // namespace

const HashKey& process_hash_key() {
  static const HashKey key = draw_key();
  return key;
}

}  // namespace bls
