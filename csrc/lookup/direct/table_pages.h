#pragma once

#include <cstddef>

namespace bls {

constexpr size_t kTablePage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

/// Bytes as whole pages.
constexpr size_t whole_pages(size_t bytes) {
  return (bytes + kTablePage - 1) / kTablePage * kTablePage;
}

/// Reserves address space where pages of 2 MiB fit: the kernel places files at any multiple of
/// 4 KiB. To be mapped over, and unmapped by the caller. Throws ChannelError.
std::byte* reserve_table_pages(size_t bytes);

/// Maps a file where pages of 2 MiB fit; see mmap. Throws ChannelError.
std::byte* map_table_file(int fd, size_t bytes, int protection, int kind);

/// Has all pages of a mapping there before the first lookup. A kernel without it leaves that to the
/// lookups. A step takes as long with pages of 2 MiB as with small ones: `page` says which these
/// are, kTablePage if some of them are small.
void populate_table_pages(const std::byte* data, size_t bytes, size_t page);

/// Unmaps in steps, as large mappings keep the other threads of a process waiting.
void unmap_table_pages(const std::byte* data, size_t bytes, size_t page) noexcept;

/// Makes this thread one that works beside lookups, for good: it maps and unmaps in small steps,
/// and rests after each for longer than it took.
void work_beside_lookups();

/// Makes such threads leave all pages as they are, for good: the process ends, and the kernel
/// unmaps them sooner than threads that rest.
void end_work_beside_lookups();

}  // namespace bls
