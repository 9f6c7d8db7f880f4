#include "host/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <climits>

namespace bls {
namespace {

// The kernel has at most 1024 nodes, and takes one off the number of bits that it is told.
constexpr size_t kMostNodes = 1024, kBitsTold = kMostNodes + 1;
constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;

struct Nodes {
  std::array<unsigned long, kMostNodes / kWordBits + 1> words = {};

  size_t count() const {
    size_t bits = 0;
    for (const unsigned long word : words) bits += static_cast<size_t>(std::popcount(word));
    return bits;
  }
};

bool has_default_policy() {
  int policy = MPOL_DEFAULT;
  return syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) == 0 &&
         policy == MPOL_DEFAULT;
}

}  // namespace

size_t interleave_nodes(void* mapping, size_t bytes) {
  Nodes allowed;
  if (!has_default_policy() || syscall(SYS_get_mempolicy, nullptr, allowed.words.data(), kBitsTold,
                                       nullptr, MPOL_F_MEMS_ALLOWED) != 0) {
    return 1;
  }
  const size_t nodes = allowed.count();
  // Straight to the kernel: a library for one call is more than it is worth.
  const bool spread = nodes > 1 && syscall(SYS_mbind, mapping, bytes, MPOL_INTERLEAVE,
                                           allowed.words.data(), kBitsTold, 0U) == 0;
  return spread ? nodes : 1;
}

}  // namespace bls
