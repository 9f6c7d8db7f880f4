#include "lookup/table.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "messages/ids/jagged_ids.h"

namespace bls {

void check_lookup(const Lookup& lookup, std::span<const int64_t> counts) {
  if (std::ranges::equal(lookup.largest, lookup.tables, std::ranges::less{}, {}, &Table::rows)) {
    return;
  }
  JaggedIds jagged;
  jagged.values = lookup.ids;
  jagged.value_bytes = lookup.id_bytes;
  jagged.features = lookup.tables.size();
  std::vector<int64_t> limits;
  for (const Table& table : lookup.tables) limits.push_back(table.rows);
  if (const auto bad = find_bad_id(jagged, limits, counts)) {
    throw std::invalid_argument("id " + std::to_string(bad->id) + " of feature " +
                                std::to_string(bad->feature) + " of the lookup, whose table has " +
                                std::to_string(limits[bad->feature]) + " rows here");
  }
}

}  // namespace bls
