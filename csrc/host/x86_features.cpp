#include "host/x86_features.h"

#include <cpuid.h>

#include <cstdint>

namespace bls {
namespace {

constexpr unsigned kOsxsave = 1u << 27, kFma = 1u << 12;  // leaf 1, ecx
constexpr unsigned kAvx2 = 1u << 5 | 1u << 3 | 1u << 8;   // leaf 7, ebx: with BMI1 and BMI2
constexpr unsigned kAvx512 = kAvx2 | 1u << 16 | 1u << 17 | 3u << 30;  // F, DQ, BW, VL
constexpr unsigned kLzcnt = 1u << 5;                                  // leaf 0x80000001, ecx
constexpr uint64_t kYmm = 0x06, kZmm = 0xe6;                          // XCR0

uint64_t saved_registers() {
  uint32_t low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

}  // namespace

// Not __builtin_cpu_supports, which asks the compiler's runtime library: Zig's, with which wheels
// may be built, says no to everything.
X86Features x86_features() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kWanted = kOsxsave | kFma;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & kWanted) != kWanted) return {};
  if (!__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) || (ecx & kLzcnt) == 0) return {};
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return {};
  const uint64_t saved = saved_registers();
  return {(saved & kYmm) == kYmm && (ebx & kAvx2) == kAvx2,
          (saved & kZmm) == kZmm && (ebx & kAvx512) == kAvx512};
}

}  // namespace bls
