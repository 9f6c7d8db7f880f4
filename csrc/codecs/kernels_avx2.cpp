#include "codecs/checksum_kernels.inc"
#include "codecs/half_kernels.inc"
#include "codecs/kernels.h"
#include "codecs/rowwise_kernels.inc"

namespace bls {
namespace {

bool run_here() { return __builtin_cpu_supports("avx2") != 0; }

}  // namespace

const Kernels kAvx2Kernels{"avx2",     run_here,     encode_rowwise, count_escaped, decode_rowwise,
                           to_float16, from_float16, to_bfloat16,    from_bfloat16, crc32c_of};

}  // namespace bls
