#pragma once

#include <cstddef>

#include "host/memory_file.h"

namespace bls {

/// Which pages a segment asks for.
enum class HugePages {
  kNo,           ///< of 4 KiB
  kTransparent,  ///< of 2 MiB where the kernel has some, and small ones where not
  kPool,         ///< of 2 MiB from the host's pool (hugetlb), or none at all
};

/// Shared memory that is all there, except for what lies between the label and the first part.
struct SegmentMemory {
  Descriptor file;
  size_t bytes = 0;             ///< of the file: from the pool whole pages
  size_t small_page_bytes = 0;  ///< of whole pages of 2 MiB that the kernel did not have
};

/// Takes memory for a segment whose parts lie from `first` on, spread over NUMA nodes
/// (interleave_nodes). Pages of 2 MiB are taken before there is something in them: to copy full
/// small ones takes ten times as long. Where none of the parts is, the label takes a small page
/// alone, but from the host's pool. Throws ChannelError without memory.
SegmentMemory take_segment_memory(size_t bytes, size_t first, HugePages pages,
                                  const MemoryPurpose& purpose);

/// The small page that has to be there before the kernel makes a page of 2 MiB of `extent`: the
/// huge page comes to the node of that one. So these pages lie on one node after the other,
/// although they are a multiple of many nodes apart.
size_t first_small_page(size_t extent, size_t nodes);

}  // namespace bls
