#include "codecs/kernels/checksum_kernels.inc"
#include "codecs/kernels/half_kernels.inc"
#include "codecs/kernels/kernels.h"
#include "codecs/kernels/rowwise_kernels.inc"
#include "host/x86_features.h"

namespace bls {
namespace {

bool run_here() { return x86_features().avx512; }

}  // namespace

const Kernels kAvx512Kernels{"avx512",       run_here,   encode_rowwise, count_escaped,
                             decode_rowwise, to_float16, from_float16,   to_bfloat16,
                             from_bfloat16,  crc32c_of};

}  // namespace bls
