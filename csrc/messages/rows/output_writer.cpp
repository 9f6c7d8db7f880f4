#include "messages/rows/output_writer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace bls {
namespace {

using Vector = float __attribute__((vector_size(16)));

constexpr size_t kVectors = 4;  // a cache line

Vector load(const std::byte* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

/// To an aligned address.
template <bool kStreams>
void store(std::byte* to, Vector vector) {
#if defined(__SSE2__)
  if constexpr (kStreams) {
    _mm_stream_ps(reinterpret_cast<float*>(to), vector);
    return;
  }
#endif
  std::memcpy(to, &vector, sizeof(vector));
}

/// Bytes before the first address that `store` takes, at most `bytes`.
size_t head_of(const std::byte* to, size_t bytes) {
  const size_t past = reinterpret_cast<uintptr_t>(to) % sizeof(Vector);
  return std::min(bytes, past == 0 ? 0 : sizeof(Vector) - past);
}

void sum_floats(std::byte* to, std::span<const std::byte* const> terms, size_t offset,
                size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(float)) {
    float sum, term;
    std::memcpy(&sum, terms[0] + offset + at, sizeof(sum));
    for (const std::byte* each : terms.subspan(1)) {
      std::memcpy(&term, each + offset + at, sizeof(term));
      sum += term;
    }
    std::memcpy(to + at, &sum, sizeof(sum));
  }
}

/// Whole lines from an aligned address on; returns how many bytes these are.
template <bool kStreams>
size_t sum_lines(std::byte* to, std::span<const std::byte* const> terms, size_t offset,
                 size_t bytes) {
  constexpr size_t kLine = kVectors * sizeof(Vector);
  size_t at = 0;
  for (; at + kLine <= bytes; at += kLine) {
    Vector sums[kVectors];
    for (size_t i = 0; i < kVectors; ++i) {
      sums[i] = load(terms[0] + offset + at + i * sizeof(Vector));
    }
    for (const std::byte* term : terms.subspan(1)) {
      for (size_t i = 0; i < kVectors; ++i)
        sums[i] += load(term + offset + at + i * sizeof(Vector));
    }
    for (size_t i = 0; i < kVectors; ++i) store<kStreams>(to + at + i * sizeof(Vector), sums[i]);
  }
  return at;
}

}  // namespace

OutputWriter::~OutputWriter() {
#if defined(__SSE2__)
  if (streams_) _mm_sfence();
#endif
}

void OutputWriter::copy(std::byte* to, const std::byte* from, size_t bytes) const {
  // Rows of this rank may have been looked up in their place.
  if (bytes == 0 || to == from) return;
  if (!streams_) {
    std::memcpy(to, from, bytes);
    return;
  }
  const size_t head = head_of(to, bytes);
  std::memcpy(to, from, head);
  const size_t done = head + sum_lines<true>(to + head, {&from, 1}, head, bytes - head);
  std::memcpy(to + done, from + done, bytes - done);
}

void OutputWriter::sum(std::byte* to, std::span<const std::byte* const> terms, size_t offset,
                       size_t bytes) const {
  if (terms.size() == 1) {
    copy(to, terms[0] + offset, bytes);
    return;
  }
  const size_t head = head_of(to, bytes);
  sum_floats(to, terms, offset, head);
  const auto lines = streams_ ? sum_lines<true> : sum_lines<false>;
  const size_t done = head + lines(to + head, terms, offset + head, bytes - head);
  sum_floats(to + done, terms, offset + done, bytes - done);
}

}  // namespace bls
