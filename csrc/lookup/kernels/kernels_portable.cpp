#include <cstddef>

namespace bls {
namespace {

constexpr size_t kVectorBytes = 16, kMostVectors = 8, kMostRows = 8;

}  // namespace
}  // namespace bls

#include "lookup/kernels/dot_products.inc"
#include "lookup/kernels/sum_bags.inc"
#include "lookup/kernels/sum_parts.inc"

namespace bls {

size_t dot_products_scratch(const Rows& rows) { return layout_of(rows).end; }

void dot_products_portable(const Rows& rows, float* scratch, float* to) {
  all_dot_products(rows, scratch, to);
}

void sum_bags_portable(const Bags& bags, std::byte* to, size_t stride) {
  sum_all(bags, to, stride);
}

void sum_parts_portable(const PartedBags& bags, std::byte* to, size_t stride) {
  sum_all_parts(bags, to, stride);
}

}  // namespace bls
