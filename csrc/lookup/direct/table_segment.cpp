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
#include "lookup/direct/writable_pages.h"

namespace bls {
namespace {

constexpr uint64_t kMagic = 0x3330'7473'6C62'6274;   // "tbblst03"
constexpr uint64_t kFamily = 0x0000'7473'6C62'6274;  // "tbblst" of any version
constexpr uint64_t kFamilyBits = 0x0000'FFFF'FFFF'FFFF;

/// What a segment begins with.
struct Header {
  uint64_t magic;
  uint64_t bytes;
  uint32_t owner;
  uint32_t version_bytes;
  std::array<std::byte, 32> layout;
  std::array<char, kLongestVersion> version;
  uint32_t pages;
  uint32_t kind;
  uint64_t small_page_bytes;
};
static_assert(sizeof(Header) <= TableSegment::kFirstOffset);

MemoryPurpose purpose(const TableLabel& label) {
  return {
      "the tables of rank " + std::to_string(label.owner) + " in version '" + label.version + "'",
      "Use smaller or quantized tables, more hosts, or lookup=\"exchange\", which holds no two "
      "versions at once; where one rank owns all tables, publish(..., drain=True), which has all "
      "readers let go of the one that serves before; or end the processes that serve, and start "
      "them with the new weights"};
}

void check_part(const TablePart& part, size_t first, size_t bytes) {
  if (part.offset < first || part.offset > bytes || part.bytes > bytes - part.offset) {
    throw std::invalid_argument("a part of " + std::to_string(part.bytes) + " bytes at " +
                                std::to_string(part.offset) + " does not fit a segment of " +
                                std::to_string(bytes) + " with parts from " +
                                std::to_string(first) + " on");
  }
}

/// Writes to a segment's memory. Files of small pages are written to by their descriptor, and those
/// of the host's pool, which can't be, through a mapping that no child inherits: either would keep
/// the file from being sealed.
class Writer {
 public:
  Writer(const SegmentMemory& memory, HugePages pages) : fd_(memory.file.get()) {
    if (pages != HugePages::kPool) return;
    mapped_.emplace(fd_, memory.bytes, "tables to write to", WritablePages::Children::kHaveNone);
  }

  void write(const void* data, size_t bytes, size_t offset) {
    if (mapped_) {
      std::memcpy(mapped_->data() + offset, data, bytes);
      return;
    }
    for (size_t done = 0; done < bytes;) {
      const ssize_t step = pwrite(fd_, static_cast<const std::byte*>(data) + done, bytes - done,
                                  static_cast<off_t>(offset + done));
      if (step < 0 && errno != EINTR) {
        fail_by_errno("cannot write " + mebibytes(bytes) + " of tables");
      }
      if (step > 0) done += static_cast<size_t>(step);
    }
  }

 private:
  int fd_;
  std::optional<WritablePages> mapped_;
};

void fill(const SegmentMemory& memory, HugePages pages, const TableLabel& label,
          const NextPart& next, size_t first, size_t bytes, TableSegment::Kind kind) {
  Writer writer(memory, pages);
  Header header{kMagic,
                bytes,
                label.owner,
                static_cast<uint32_t>(label.version.size()),
                label.layout,
                {},
                static_cast<uint32_t>(pages),
                static_cast<uint32_t>(kind),
                memory.small_page_bytes};
  std::memcpy(header.version.data(), label.version.data(), label.version.size());
  writer.write(&header, sizeof(header), 0);
  while (const std::optional<TablePart> part = next()) {
    check_part(*part, first, bytes);
    writer.write(part->data, part->bytes, part->offset);
  }
}

[[noreturn]] void foreign(const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol, "the shared memory that was announced as tables " +
                                               what +
                                               ". Shard the same model by the same plan on every "
                                               "rank, with one version of torchrec-bls");
}

/// Whether a file of so many bytes is what a header says.
bool fits(const Header& header, size_t file_bytes) {
  const bool from_pool = header.pages == static_cast<uint32_t>(HugePages::kPool);
  const size_t unused = file_bytes - std::min<size_t>(header.bytes, file_bytes);
  return header.bytes >= TableSegment::kFirstOffset && header.bytes <= file_bytes &&
         (from_pool ? unused < kHugePage : unused == 0);
}

/// Returns the header of a file with the label that is expected.
Header checked_header(const std::byte* data, size_t file_bytes, const TableLabel& expected) {
  Header header;
  std::memcpy(&header, data, sizeof(header));
  if (header.magic != kMagic && (header.magic & kFamilyBits) == kFamily) {
    foreign("is of another version of torchrec-bls");
  }
  if (header.magic != kMagic || !fits(header, file_bytes)) foreign("has no label");
  const std::string version(header.version.data(),
                            std::min<size_t>(header.version_bytes, header.version.size()));
  if (!is_version(version)) foreign("has a label of no version");
  if (TableLabel{header.owner, version, header.layout} == expected) return header;
  if (header.layout != expected.layout) foreign("has other shards than this rank expects");
  foreign("is of rank " + std::to_string(header.owner) + " and version '" + version +
          "', not of rank " + std::to_string(expected.owner) + " and version '" + expected.version +
          "'");
}

}  // namespace

TableSegment TableSegment::create(const TableLabel& label, std::span<const TablePart> parts,
                                  size_t bytes, HugePages pages) {
  size_t number = 0;
  const NextPart next = [&]() -> std::optional<TablePart> {
    if (number == parts.size()) return std::nullopt;
    return parts[number++];
  };
  return create(label, next, bytes, pages);
}

TableSegment TableSegment::create(const TableLabel& label, const NextPart& next, size_t bytes,
                                  HugePages pages, size_t first, Kind kind) {
  if (!is_version(label.version)) throw std::invalid_argument("a label of no version");
  bytes = std::max(bytes, kFirstOffset);
  if (first < kFirstOffset || first > bytes) {
    throw std::invalid_argument("the first part at " + std::to_string(first) + " of " +
                                std::to_string(bytes) + " bytes");
  }
  const MemoryPurpose why = purpose(label);
  SegmentMemory memory = take_segment_memory(bytes, first, pages, why);
  fill(memory, pages, label, next, first, bytes, kind);
  std::unique_ptr<WritablePages> writable;
  if (kind == Kind::kRefreshed) {
    writable = std::make_unique<WritablePages>(memory.file.get(), memory.bytes, "tables to refresh",
                                               WritablePages::Children::kHaveNone);
    // Rows that are scattered would wait for a page each. Before the first part there is no memory.
    const size_t begin = first / kTablePage * kTablePage;
    populate_table_pages(writable->data() + begin, memory.bytes - begin, kTablePage);
  }
  seal_memory_file(memory.file.get(), writable ? Seal::kLaterWriters : Seal::kContents, why);
  TableSegment made(std::move(memory.file), label);
  made.writable_ = std::move(writable);
  return made;
}

TableSegment TableSegment::open(const MemoryFileAddress& address, const TableLabel& expected) {
  return adopt(open_memory_file(address, false), expected);
}

TableSegment TableSegment::adopt(Descriptor file, const TableLabel& expected) {
  return TableSegment(std::move(file), expected);
}

TableSegment::TableSegment(Descriptor file, const TableLabel& expected) : file_(std::move(file)) {
  const size_t bytes = address_of(file_.get()).bytes;
  if (bytes < kFirstOffset || !is_sealed(file_.get(), bytes, Seal::kLaterWriters)) {
    foreign("is not sealed, or too short to be any");
  }
  std::byte* const data = map_table_file(file_.get(), bytes, PROT_READ, MAP_SHARED);
  try {
    const Header header = checked_header(data, bytes, expected);
    size_ = header.bytes;
    small_page_bytes_ = header.small_page_bytes;
    pages_ = static_cast<HugePages>(header.pages);
    kind_ = static_cast<Kind>(header.kind);
    if (kind_ != Kind::kRefreshed && !is_sealed(file_.get(), bytes, Seal::kContents)) {
      foreign("is not sealed");
    }
  } catch (...) {
    munmap(data, bytes);
    throw;
  }
  data_ = data;
  mapped_bytes_ = bytes;
}

TableSegment::TableSegment(TableSegment&& other) noexcept
    : file_(std::move(other.file_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(other.size_),
      mapped_bytes_(other.mapped_bytes_),
      small_page_bytes_(other.small_page_bytes_),
      pages_(other.pages_),
      kind_(other.kind_),
      writable_(std::move(other.writable_)) {}

TableSegment& TableSegment::operator=(TableSegment&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(small_page_bytes_, other.small_page_bytes_);
  std::swap(pages_, other.pages_);
  std::swap(kind_, other.kind_);
  std::swap(writable_, other.writable_);
  return *this;
}

TableSegment::~TableSegment() {
  if (data_ != nullptr) unmap_table_pages(data_, mapped_bytes_, page_bytes());
}

PrivatePages::PrivatePages(const TableSegment& segment)
    : data_(map_table_file(segment.descriptor(), segment.mapped_bytes(), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_NORESERVE)),
      size_(segment.size()),
      mapped_bytes_(segment.mapped_bytes()) {}

PrivatePages::PrivatePages(PrivatePages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(other.size_),
      mapped_bytes_(other.mapped_bytes_) {}

PrivatePages::~PrivatePages() {
  if (data_ != nullptr) munmap(data_, mapped_bytes_);
}

}  // namespace bls
