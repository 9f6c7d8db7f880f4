#pragma once

#include <cstddef>

namespace bls {

/// Spreads what a mapping of a file will have over the NUMA nodes that this process may use, page
/// by page, whoever takes the pages later. Returns their number. It is 1, and nothing is changed,
/// where there is one, where the process has a policy already (numactl), or where a container
/// forbids it.
size_t interleave_nodes(void* mapping, size_t bytes);

}  // namespace bls
