#pragma once

#include <cstdint>
#include <vector>

#include "messages/ids/jagged_ids.h"

namespace bls::testing {

/// Ids of `features` that lie in these vectors.
inline JaggedIds ids_of(const std::vector<int64_t>& lengths, const std::vector<int64_t>& values,
                        size_t features) {
  JaggedIds ids;
  ids.lengths = reinterpret_cast<const std::byte*>(lengths.data());
  ids.values = reinterpret_cast<const std::byte*>(values.data());
  ids.features = features;
  ids.stride = lengths.size() / features;
  ids.count = values.size();
  return ids;
}

}  // namespace bls::testing
