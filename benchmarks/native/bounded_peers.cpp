// What benchmarks/codecs/bounded.py calls beside error-bounded rows: compressors of bytes behind a
// quantizer for the same bound, and coders of symbols beside the codec's own. Their times have
// nothing of Python, and they need not look whether values have a code.

#include <immintrin.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "codecs/bounded/grid.h"
#include "codecs/bounded/kernels/kernels.h"
#include "codecs/bounded/symbols/symbols.h"
#if __has_include(<libdeflate.h>)
#include <libdeflate.h>
#endif
#if __has_include(<lz4.h>)
#include <lz4.h>
#endif
#if __has_include(<zstd.h>)
#include <zstd.h>
extern "C" {  // in zstd's archive; flags: 1 for BMI2
size_t HUF_compress4X_repeat(void* out, size_t room, const void* in, size_t size, unsigned symbols,
                             unsigned longest, void* work, size_t work_bytes, void* table,
                             void* repeat, int flags);
size_t HUF_decompress4X_hufOnly_wksp(uint32_t* table, void* out, size_t room, const void* in,
                                     size_t size, void* work, size_t work_bytes, int flags);
}
#endif

namespace {

using namespace bls;

/// Returns the bytes it wrote; 1 where all symbols are the same, and 0, an error or too many where
/// they cannot be compressed.
using Step = std::function<size_t(void* out, size_t room, const void* in, size_t size)>;

struct Peer {
  Step compress, decompress;
};

Peer peer_of(std::string_view name, int level) {
#if __has_include(<libdeflate.h>)
  if (name == "libdeflate") {
    auto* const to = libdeflate_alloc_compressor(level);
    auto* const from = libdeflate_alloc_decompressor();
    return {[=](void* out, size_t room, const void* in, size_t size) {
              return libdeflate_deflate_compress(to, in, size, out, room);
            },
            [=](void* out, size_t room, const void* in, size_t size) -> size_t {
              return libdeflate_deflate_decompress(from, in, size, out, room, nullptr);
            }};
  }
#endif
#if __has_include(<lz4.h>)
  if (name == "lz4") {
    const auto step = [](auto* call) {
      return [=](void* out, size_t room, const void* in, size_t size) -> size_t {
        return call(static_cast<const char*>(in), static_cast<char*>(out), size, room);
      };
    };
    return {step(LZ4_compress_default), step(LZ4_decompress_safe)};
  }
#endif
#if __has_include(<zstd.h>)
  if (name == "huff0") {
    static uint64_t work[4096];
    static uint32_t table[1 + (1 << 12)];
    return {[](auto... each) {
              return HUF_compress4X_repeat(each..., 255, 11, work, sizeof work, nullptr, nullptr,
                                           1);
            },
            [](auto... each) {
              table[0] = 12 * 0x01000001;  // no code yet, and how long one may be
              return HUF_decompress4X_hufOnly_wksp(table, each..., work, sizeof work, 1);
            }};
  }
  if (name == "zstd") {
    auto* const to = ZSTD_createCCtx();
    auto* const from = ZSTD_createDCtx();
    return {[=](auto... each) { return ZSTD_compressCCtx(to, each..., level); },
            [=](auto... each) { return ZSTD_decompressDCtx(from, each...); }};
  }
#endif
  if (name != "ours") return {};
  using std::byte;
  return {[](void* out, size_t, const void* in, size_t size) -> size_t {
            const auto* symbols = static_cast<const int8_t*>(in);
            auto* const to = static_cast<byte*>(out);
            return bounded::write_symbols(symbols, size, false, to) - to;
          },
          [](void* out, size_t room, const void* in, size_t size) -> size_t {
            const auto* from = static_cast<const byte*>(in);
            return bounded::read_symbols(from, from + size, static_cast<int8_t*>(out), room) - from;
          }};
}

/// 32 values at a time, of which rows have a multiple here.
[[gnu::target("avx2")]] void quantize(const float* in, size_t count, float inverse, int8_t* out) {
  for (size_t at = 0; at < count; at += 32) {
    __m256i codes[4];
    for (int i = 0; i < 4; ++i) {
      const __m256 values = _mm256_loadu_ps(in + at + 8 * i);
      codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values, _mm256_set1_ps(inverse)));
    }
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]),
                                              _mm256_packs_epi32(codes[2], codes[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at),
                        _mm256_permutevar8x32_epi32(packed, order));
  }
}

struct Table {
  const void* in;  // float32, or symbols where there is no bound
  void* out;
  size_t rows, columns;

  size_t values() const { return rows * columns; }
};

struct Work {
  Peer peer;
  std::vector<int8_t> codes{};
  std::vector<char> encoded{};
  std::vector<size_t> sizes{};
  std::vector<uint32_t> rows{};
};

}  // namespace

/// Null where the peer was not built in.
extern "C" Work* open_peer(const char* name, int level) {
  const Peer peer = peer_of(name, level);
  return peer.compress ? new Work{peer} : nullptr;
}

/// Returns the bytes of all tables.
extern "C" size_t encode_tables(Work* work, float bound, const Table* tables, size_t count) {
  size_t end = 0;
  work->sizes.clear();
  for (const Table& table : std::span(tables, count)) {
    const size_t values = table.values();
    const void* in = table.in;
    if (work->encoded.size() < end + 2 * values + 4096)
      work->encoded.resize(end + 3 * values + 8192);
    if (bound > 0) {
      if (work->codes.size() < values) work->codes.resize(values);
      const float inverse = bounded::grid_of(bound, 8).inverse;
      quantize(static_cast<const float*>(table.in), values, inverse, work->codes.data());
      in = work->codes.data();
    }
    char* const out = work->encoded.data() + end;
    size_t bytes = work->peer.compress(out, work->encoded.size() - end, in, values);
    if (bytes == 1) *out = *static_cast<const char*>(in);
    if (bytes == 0 || bytes >= values) std::memcpy(out, in, bytes = values);
    work->sizes.push_back(bytes);
    end += bytes;
  }
  return end;
}

extern "C" void decode_tables(Work* work, float bound, const Table* tables, size_t count) {
  const char* in = work->encoded.data();
  for (size_t i = 0; i < count; in += work->sizes[i++]) {
    const Table& table = tables[i];
    void* const out = bound > 0 ? work->codes.data() : table.out;
    if (work->sizes[i] == table.values()) {
      std::memcpy(out, in, table.values());
    } else if (work->sizes[i] == 1) {
      std::memset(out, *in, table.values());
    } else {
      work->peer.decompress(out, table.values(), in, work->sizes[i]);
    }
    if (bound <= 0) continue;
    if (work->rows.size() < table.rows) {
      work->rows.resize(table.rows);
      std::iota(work->rows.begin(), work->rows.end(), 0u);
    }
    const Matrix<float> to{static_cast<float*>(table.out), table.rows, table.columns,
                           table.columns};
    const float scale = bounded::grid_of(bound, 8).scale;
    bounded::kernels().dequantize8(work->codes.data(), work->rows.data(), scale, to);
  }
}
