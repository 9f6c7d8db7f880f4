#include <cstddef>

namespace bls {
namespace {

constexpr size_t kVectorBytes = 32, kMostVectors = 16;

}  // namespace
}  // namespace bls

#include "lookup/kernels/sum_bags.inc"
#include "lookup/kernels/sum_parts.inc"

namespace bls {

void sum_bags_avx2(const Bags& bags, std::byte* to, size_t stride) { sum_all(bags, to, stride); }

void sum_parts_avx2(const PartedBags& bags, std::byte* to, size_t stride) {
  sum_all_parts(bags, to, stride);
}

}  // namespace bls
