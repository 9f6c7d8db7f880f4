#pragma once

#include <cstddef>
#include <span>

namespace bls {

/// Writes an output that the caller reads later. One that is larger than a core's own cache goes
/// past the caches: its lines need not be read before they are written, nor push others out, and
/// the caller would find few of them there anyhow (docs/design/forward.md has what that saves).
class OutputWriter {
 public:
  /// For an output of this size.
  explicit OutputWriter(size_t bytes) : streams_(bytes >= kStreamedBytes) {}
  OutputWriter(const OutputWriter&) = delete;
  OutputWriter& operator=(const OutputWriter&) = delete;
  /// From here on what was written is there for all threads that learn of it.
  ~OutputWriter();

  /// Nothing where `from` is `to`.
  void copy(std::byte* to, const std::byte* from, size_t bytes) const;
  /// The sums of floats at `offset` of all terms, in their order; one term may be of any type.
  void sum(std::byte* to, std::span<const std::byte* const> terms, size_t offset,
           size_t bytes) const;

  static constexpr size_t kStreamedBytes = size_t{1} << 20;

 private:
  const bool streams_;
};

}  // namespace bls
