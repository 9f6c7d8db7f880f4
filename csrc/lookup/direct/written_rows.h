#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lookup/direct/table_window.h"

namespace bls {

/// Writes rows of a table to segments that this process refreshes. Nobody may read them meanwhile:
/// see ControlPage::set_serial_on.
///
/// `pieces` are where the table lies, in its order; a row may lie in two of them. `rows` has
/// `row_bytes` for each id. Of an id that comes twice the last row counts. Throws
/// std::invalid_argument, with nothing written, for an id that is out of range, for a table of no
/// whole rows, and for segments that are not this process's to write to.
void write_rows(std::span<const SegmentPages> pieces, size_t row_bytes,
                std::span<const int64_t> ids, const std::byte* rows);

/// Copies rows of a table to segments that this process refreshes, as `write_rows` writes them.
///
/// `sources` are where the same table lies elsewhere, in pieces of the same sizes; or it throws
/// std::invalid_argument.
void copy_rows(std::span<const SegmentPages> sources, std::span<const SegmentPages> pieces,
               size_t row_bytes, std::span<const int64_t> ids);

}  // namespace bls
