#include "codecs/bounded/kernels/dequantize.inc"
#include "codecs/bounded/kernels/find_rows.inc"
#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/kernels/row_sources.inc"
#include "codecs/bounded/kernels/streams.inc"

namespace bls::bounded {

const Kernels kAvx512Kernels{find_rows8,   find_rows16,  write_numbers, read_sources, count_symbols,
                             write_stream, read_streams, dequantize8,   dequantize16};

}  // namespace bls::bounded
