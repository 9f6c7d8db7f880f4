#include <vector>

#include "host/instruction_set.h"
#include "lookup/kernels/dot_products.h"
#include "lookup/kernels/sum_bags.h"
#include "lookup/kernels/sum_parts.h"

namespace bls {
namespace {

/// What memory is made of that has to begin with a cache line.
struct alignas(64) CacheLine {
  float floats[16];
};

}  // namespace

void dot_products(const Rows& rows, float* to) {
  std::vector<CacheLine> memory(dot_products_scratch(rows) / 16 + 1);
  float* const scratch = memory[0].floats;
  switch (instruction_set()) {
#ifdef __x86_64__
    case InstructionSet::kAvx512:
      return dot_products_avx512(rows, scratch, to);
    case InstructionSet::kAvx2:
      return dot_products_avx2(rows, scratch, to);
#endif
    default:
      return dot_products_portable(rows, scratch, to);
  }
}

void sum_bags(const Bags& bags, std::byte* to, size_t stride) {
  switch (instruction_set()) {
#ifdef __x86_64__
    case InstructionSet::kAvx512:
      return sum_bags_avx512(bags, to, stride);
    case InstructionSet::kAvx2:
      return sum_bags_avx2(bags, to, stride);
#endif
    default:
      return sum_bags_portable(bags, to, stride);
  }
}

void sum_parts(const PartedBags& bags, std::byte* to, size_t stride) {
  switch (instruction_set()) {
#ifdef __x86_64__
    case InstructionSet::kAvx512:
      return sum_parts_avx512(bags, to, stride);
    case InstructionSet::kAvx2:
      return sum_parts_avx2(bags, to, stride);
#endif
    default:
      return sum_parts_portable(bags, to, stride);
  }
}

}  // namespace bls
