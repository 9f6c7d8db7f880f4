#include <cstddef>

namespace bls {
namespace {

constexpr size_t kVectorBytes = 32, kMostVectors = 16, kMostRows = 12;

}  // namespace
}  // namespace bls

#include "lookup/kernels/dot_products.inc"
#include "lookup/kernels/sum_bags.inc"
#include "lookup/kernels/sum_parts.inc"

namespace bls {

void dot_products_avx2(const Rows& rows, float* scratch, float* to) {
  all_dot_products(rows, scratch, to);
}

void sum_bags_avx2(const Bags& bags, std::byte* to, size_t stride) { sum_all(bags, to, stride); }

void sum_parts_avx2(const PartedBags& bags, std::byte* to, size_t stride) {
  sum_all_parts(bags, to, stride);
}

}  // namespace bls
