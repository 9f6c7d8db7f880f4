#include "lookup/kernels/sum_bags.h"

#include "host/instruction_set.h"
#include "lookup/kernels/sum_parts.h"

namespace bls {

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
