#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/bounded/bounded.h"
#include "codecs/codec.h"
#include "codecs/row_groups.h"

namespace bls {

/// A frame holds the encoded rows of several tables for one rank: a header with a checksum, the
/// codec of each table, and what `encode` wrote for it, which tells where it ends
/// (docs/wire-format.md). Which tables, codecs and shapes those are, both ends know; what the frame
/// says of them is only compared.
///
/// Which rows are known to belong together, and which error bounds are in force, the header says by
/// checksums.
constexpr size_t kFrameHeaderBytes = 28;
constexpr size_t kFrameTableBytes = 1;

template <typename T>
struct FrameTable {
  Codec codec = Codec::kFloat32;
  Matrix<T> rows{};
  float bound = 0;  ///< of error-bounded rows
  RowGroups groups{};
  bool summed = false;       ///< whether the sum of a group's rows travels, not the first one
  bool fixed_width = false;  ///< whether error-bounded rows are encoded so
};

/// The least that `encode_frame` writes.
size_t least_frame_bytes(std::span<const FrameTable<const float>> tables);
/// What to keep room for: `usual_bytes` of all rows, equal or not, and a byte for each
/// error-bounded value. Rows of a model that is not trained yet take next to nothing, and tell
/// nothing of what later ones will take.
size_t usual_frame_bytes(std::span<const FrameTable<const float>> tables);

/// Returns how many bytes the frame takes, and writes it to `out` if it has so many.
///
/// Throws std::invalid_argument as `bounded::encode` does.
size_t encode_frame(std::span<const FrameTable<const float>> tables, std::span<std::byte> out);

/// Reads what `encode_frame` wrote of tables of the same codecs and shapes.
///
/// Throws ChannelError (kProtocol) if `in` cannot be that; some rows may be written then.
void decode_frame(std::span<const std::byte> in, std::span<const FrameTable<float>> tables);

}  // namespace bls
