#include "lookup/direct/table_segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "errors.h"
#include "lookup/direct/table_pages.h"
#include "lookup/direct/version_name.h"

namespace bls {
namespace {

constexpr uint64_t kMagic = 0x3330'7473'6C62'6274;   // "tbblst03"
constexpr uint64_t kFamily = 0x0000'7473'6C62'6274;  // "tbblst" of any version
constexpr uint64_t kFamilyBits = 0x0000'FFFF'FFFF'FFFF;
constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1

/// What a segment begins with.
struct Header {
  uint64_t magic;
  uint64_t bytes;
  uint32_t owner;
  uint32_t version_bytes;
  std::array<std::byte, 32> layout;
  std::array<char, kLongestVersion> version;
};
static_assert(sizeof(Header) <= TableSegment::kFirstOffset);

MemoryPurpose purpose(const TableLabel& label) {
  return {
      "the tables of rank " + std::to_string(label.owner) + " in version '" + label.version + "'",
      "Use smaller or quantized tables, more hosts, or lookup=\"exchange\", which holds no two "
      "versions at once"};
}

/// Maps a file where pages of 2 MiB fit.
std::byte* map_aligned(int fd, size_t bytes, int protection, int kind) {
  std::byte* const at = reserve_table_pages(bytes);
  if (mmap(at, bytes, protection, kind | MAP_FIXED, fd, 0) == MAP_FAILED) {
    munmap(at, whole_pages(bytes));
    fail_by_errno("cannot map " + mebibytes(bytes) + " of tables");
  }
  return at;
}

void check_part(const TablePart& part, size_t bytes) {
  if (part.offset < TableSegment::kFirstOffset || part.offset > bytes ||
      part.bytes > bytes - part.offset) {
    throw std::invalid_argument("a part of " + std::to_string(part.bytes) + " bytes at " +
                                std::to_string(part.offset) + " does not fit a segment of " +
                                std::to_string(bytes));
  }
}

void write_at(int fd, const void* data, size_t bytes, size_t offset) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t step = pwrite(fd, static_cast<const std::byte*>(data) + done, bytes - done,
                                static_cast<off_t>(offset + done));
    if (step < 0 && errno != EINTR)
      fail_by_errno("cannot write " + mebibytes(bytes) + " of tables");
    if (step > 0) done += static_cast<size_t>(step);
  }
}

/// Writes through the descriptor: a child that is forked meanwhile would inherit a mapping to write
/// to, which keeps the file from being sealed.
void fill(int fd, const TableLabel& label, const NextPart& next, size_t bytes) {
  Header header{kMagic,       bytes, label.owner, static_cast<uint32_t>(label.version.size()),
                label.layout, {}};
  std::memcpy(header.version.data(), label.version.data(), label.version.size());
  write_at(fd, &header, sizeof(header), 0);
  while (const std::optional<TablePart> part = next()) {
    check_part(*part, bytes);
    write_at(fd, part->data, part->bytes, part->offset);
  }
}

void collapse(int fd, size_t bytes) {
  std::byte* const pages = map_aligned(fd, bytes, PROT_READ, MAP_SHARED);
  madvise(pages, bytes, kCollapse);
  unmap_table_pages(pages, bytes);
}

[[noreturn]] void foreign(const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol, "the shared memory that was announced as tables " +
                                               what +
                                               ". Shard the same model by the same plan on every "
                                               "rank, with one version of torchrec-bls");
}

void check_label(const std::byte* data, size_t bytes, const TableLabel& expected) {
  Header header;
  std::memcpy(&header, data, sizeof(header));
  if (header.magic != kMagic && (header.magic & kFamilyBits) == kFamily) {
    foreign("is of another version of torchrec-bls");
  }
  if (header.magic != kMagic || header.bytes != bytes) foreign("has no label");
  const std::string version(header.version.data(),
                            std::min<size_t>(header.version_bytes, header.version.size()));
  if (!is_version(version)) foreign("has a label of no version");
  if (TableLabel{header.owner, version, header.layout} == expected) return;
  if (header.layout != expected.layout) foreign("has other shards than this rank expects");
  foreign("is of rank " + std::to_string(header.owner) + " and version '" + version +
          "', not of rank " + std::to_string(expected.owner) + " and version '" + expected.version +
          "'");
}

}  // namespace

TableSegment TableSegment::create(const TableLabel& label, std::span<const TablePart> parts,
                                  size_t bytes, bool huge_pages) {
  size_t number = 0;
  const NextPart next = [&]() -> std::optional<TablePart> {
    if (number == parts.size()) return std::nullopt;
    return parts[number++];
  };
  return create(label, next, bytes, huge_pages);
}

TableSegment TableSegment::create(const TableLabel& label, const NextPart& next, size_t bytes,
                                  bool huge_pages) {
  if (!is_version(label.version)) throw std::invalid_argument("a label of no version");
  bytes = std::max(bytes, kFirstOffset);
  const MemoryPurpose why = purpose(label);
  Descriptor file = create_memory_file(bytes, why);
  fill(file.get(), label, next, bytes);
  if (huge_pages) collapse(file.get(), bytes);
  seal_memory_file(file.get(), true, why);
  return TableSegment(std::move(file));
}

TableSegment TableSegment::open(const MemoryFileAddress& address, const TableLabel& expected) {
  return adopt(open_memory_file(address, false), expected);
}

TableSegment TableSegment::adopt(Descriptor file, const TableLabel& expected) {
  TableSegment segment(std::move(file));
  check_label(segment.data_, segment.size_, expected);
  return segment;
}

TableSegment::TableSegment(Descriptor file) : file_(std::move(file)) {
  const size_t bytes = address_of(file_.get()).bytes;
  if (bytes < kFirstOffset || !is_sealed(file_.get(), bytes, true)) {
    foreign("is not sealed, or too short to be any");
  }
  data_ = map_aligned(file_.get(), bytes, PROT_READ, MAP_SHARED);
  size_ = bytes;
}

TableSegment::TableSegment(TableSegment&& other) noexcept
    : file_(std::move(other.file_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

TableSegment& TableSegment::operator=(TableSegment&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

TableSegment::~TableSegment() {
  if (data_ != nullptr) unmap_table_pages(data_, size_);
}

PrivatePages::PrivatePages(const TableSegment& segment)
    : data_(map_aligned(segment.descriptor(), segment.size(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_NORESERVE)),
      size_(segment.size()) {}

PrivatePages::PrivatePages(PrivatePages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

PrivatePages::~PrivatePages() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace bls
