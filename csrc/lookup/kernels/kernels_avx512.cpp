#include <cstddef>

namespace bls {
namespace {

constexpr size_t kVectorBytes = 64, kMostVectors = 16, kMostRows = 26;

}  // namespace
}  // namespace bls

#include "lookup/kernels/dot_products.inc"
#include "lookup/kernels/sum_bags.inc"
#include "lookup/kernels/sum_parts.inc"

namespace bls {

void dot_products_avx512(const Rows& rows, float* scratch, float* to) {
  all_dot_products(rows, scratch, to);
}

void sum_bags_avx512(const Bags& bags, std::byte* to, size_t stride) { sum_all(bags, to, stride); }

void sum_parts_avx512(const PartedBags& bags, std::byte* to, size_t stride) {
  sum_all_parts(bags, to, stride);
}

}  // namespace bls
