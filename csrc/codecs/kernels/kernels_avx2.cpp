#include "codecs/kernels/checksum_kernels.inc"
#include "codecs/kernels/half_kernels.inc"
#include "codecs/kernels/kernels.h"
#include "codecs/kernels/rowwise_kernels.inc"
#include "codecs/kernels/stored_rows_kernels.inc"

namespace bls {

const Kernels kAvx2Kernels{encode_rowwise, count_escaped, decode_rowwise, to_float16, from_float16,
                           to_bfloat16,    from_bfloat16, crc32c_of,      store_int8};

}  // namespace bls
