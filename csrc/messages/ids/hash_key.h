#pragma once

#include <cstddef>
#include <cstdint>

namespace bls {

/// Secret of a hash of ids. Requests choose ids: with a known hash they could choose ids that
/// collide.
///
/// The hash is wyhash's: products of 128 bits, folded by exclusive or. Nothing that leaves the
/// process depends on the key, and so nobody can fit ids to it. Ids that are chosen without it
/// share slots no more often than random ones: the last factor is a random odd number, and the
/// highest bits of such a product are universal (Dietzfelbinger et al., 1997, "A reliable
/// randomized algorithm for the closest-pair problem"). The products before break patterns that
/// one product keeps, consecutive ids for instance.
class HashKey {
 public:
  /// Any numbers do.
  HashKey(uint64_t first, uint64_t second, uint64_t last)
      : first_(first), second_(second | 1), last_(last | 1) {}

  /// The hash of an id. The highest bits are the best ones.
  uint64_t of(uint64_t id) const { return fold(id ^ first_, second_) * last_; }

  /// The hash of ids in their order.
  template <class Id>
  uint64_t of(const Id* ids, size_t count) const {
    const auto id = [ids](size_t i) { return static_cast<uint64_t>(ids[i]); };
    uint64_t state = first_ + count;
    size_t i = 0;
    for (; i + 1 < count; i += 2) state = fold(id(i) ^ second_, id(i + 1) ^ state);
    if (i < count) state = fold(id(i) ^ second_, state);
    return state * last_;
  }

 private:
  static uint64_t fold(uint64_t a, uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }

  uint64_t first_, second_, last_;
};

/// The key of this process, drawn from the system's randomness at the first call. Children that
/// are forked after it have it too. Throws std::system_error when the system gives none.
const HashKey& process_hash_key();

}  // namespace bls
