#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace bls {

/// The numbers of both are those of torchrec_bls/collective/backend/all_reduces.py.
enum class Element : uint8_t { kFloat32, kFloat64, kFloat16, kBfloat16, kInt32, kInt64 };
constexpr uint8_t kElements = 6;

enum class Reduction : uint8_t { kSum, kAverage, kMax, kMin };
constexpr uint8_t kReductions = 4;

size_t bytes_of(Element element);
const char* name_of(Element element);
const char* name_of(Reduction reduction);

/// Writes to `out` the reduction of `count` elements of each of `sources`, of which `out` may be
/// one. Every other memory is apart.
///
/// The order is that of `sources`: the result is the same, bit for bit, wherever it is made. Sums
/// of float32 are made in float64 and those of 16 bits in float32, and rounded once, so that those
/// of float32 are as near as can be: two terms are added as they are, with the same result.
/// Averages are sums, divided before they are rounded, and not for integers. Sums of integers wrap
/// around. A NaN is the largest and the smallest of all.
void reduce(Element element, Reduction reduction, std::span<const std::byte* const> sources,
            size_t count, std::byte* out);

}  // namespace bls
