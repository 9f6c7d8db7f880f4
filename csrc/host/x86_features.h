#pragma once

namespace bls {

/// Instruction sets that this processor has and whose registers the kernel saves.
struct X86Features {
  bool avx2;    ///< with FMA, LZCNT, BMI1 and BMI2
  bool avx512;  ///< F, BW, DQ and VL, beside all of these
};

X86Features x86_features();

}  // namespace bls
