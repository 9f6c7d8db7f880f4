#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "channel/channel.h"
#include "rows/row_message.h"
#include "rows/table.h"

namespace bls {

/// Rows that ids name: those of feature f come from `tables[f]`. The ids lie one behind the other
/// in the order of `groups`, as ArrivedIds puts them together.
struct TableRows {
  std::span<const Table> tables;  ///< [features]
  const std::byte* ids = nullptr;
  size_t id_bytes = 8;
  GroupedRows groups;
};

/// Looks up and posts at once: each rank's rows go straight from the tables into its slots, feature
/// by feature, without the buffer that a lookup would fill first. This rank's own message is empty;
/// its rows are written to `own`. Throws std::invalid_argument naming an id that its table does not
/// have; nothing is posted then.
void post_table_rows(Channel& channel, const TableRows& rows, std::byte* own);

}  // namespace bls
