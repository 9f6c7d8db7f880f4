#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "channel/channel.h"
#include "lookup/table.h"
#include "messages/rows/row_message.h"

namespace bls {

/// A lookup whose ids lie in the order of `groups`, as BatchIds puts them together.
struct TableRows : Lookup {
  GroupedRows groups;
};

/// Looks up and posts at once: each rank's rows go straight from the tables into its slots, feature
/// by feature, without the buffer that a lookup would fill first. This rank's own message is empty;
/// its rows are written to `own`. Throws std::invalid_argument when the groups do not fit the ids
/// or a table does not have one of them; nothing is posted then.
void post_table_rows(Channel& channel, const TableRows& rows, std::byte* own);

/// The same for tables whose rows are not all of one size: `rows.groups.row_bytes` does not count,
/// and padding does not travel. This rank's own rows go to it in a message, as those of the others
/// do.
void post_stored_rows(Channel& channel, const TableRows& rows);

/// Writes the rows of all ids to `out`, one behind the other. Throws as above; nothing is written
/// then.
void copy_table_rows(const TableRows& rows, std::byte* out);

}  // namespace bls
