#include "codecs/bounded/kernels/kernels.h"

#include "host/instruction_set.h"

namespace bls::bounded {

const Kernels& kernels() {
  switch (instruction_set()) {
#ifdef __x86_64__
    case InstructionSet::kAvx512:
      return kAvx512Kernels;
    case InstructionSet::kAvx2:
      return kAvx2Kernels;
#endif
    default:
      return kPortableKernels;
  }
}

}  // namespace bls::bounded
