#include "codecs/bounded/kernels/dequantize.inc"
#include "codecs/bounded/kernels/find_rows.inc"
#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/kernels/quantize.inc"
#include "codecs/bounded/kernels/streams.inc"

namespace bls::bounded {

const Kernels kAvx2Kernels{quantize8,    quantize16,   find_rows,   count_symbols,
                           write_stream, read_streams, dequantize8, dequantize16};

}  // namespace bls::bounded
