#include "lookup/direct/control_page.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "errors.h"

namespace bls {
namespace {

constexpr uint64_t kMagic = 0x3130'6765'6E62'6274;  // "tbbneg01"
constexpr size_t kCacheLine = 64;

struct alignas(kCacheLine) Header {
  uint64_t magic;
  uint32_t owners;
  uint32_t unused;
  ControlPage::Digest layout;
};

/// An address of which other processes may see a half.
struct Record {
  std::atomic<uint64_t> process;  // pid, and the descriptor in the upper half
  std::atomic<uint64_t> device;
  std::atomic<uint64_t> inode;
  std::atomic<uint64_t> bytes;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock of one process is no other's");

[[noreturn]] void foreign(const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol,
                     "the shared memory that was announced as the control page of tables " + what +
                         ". Shard the same model by the same plan on every rank, with one version "
                         "of torchrec-bls");
}

}  // namespace

struct alignas(kCacheLine) ControlPage::Owner {
  std::atomic<uint64_t> announced;
  std::atomic<uint64_t> process;
  std::array<Record, 2> records;
};

ControlPage ControlPage::create(uint32_t owners, const Digest& layout) {
  if (owners == 0) throw std::invalid_argument("a control page of no owners");
  const MemoryPurpose purpose{"the control page of tables", "Free some memory"};
  Descriptor file = create_memory_file(sizeof(Header) + owners * sizeof(Owner), purpose);
  seal_memory_file(file.get(), false, purpose);
  return ControlPage(std::move(file), owners, layout, true);
}

ControlPage ControlPage::open(const MemoryFileAddress& address, uint32_t owners,
                              const Digest& layout) {
  return adopt(open_memory_file(address, true), owners, layout);
}

ControlPage ControlPage::adopt(Descriptor file, uint32_t owners, const Digest& layout) {
  return ControlPage(std::move(file), owners, layout, false);
}

ControlPage::ControlPage(Descriptor file, uint32_t owners, const Digest& layout, bool is_new)
    : file_(std::move(file)), owners_(owners), bytes_(sizeof(Header) + owners * sizeof(Owner)) {
  if (!is_sealed(file_.get(), bytes_, false)) foreign("is not sealed, or of another size");
  pages_ = std::make_unique<WritablePages>(file_.get(), bytes_, "the control page of tables");
  data_ = pages_->data();
  if (is_new) {
    const Header header{kMagic, owners, 0, layout};
    std::memcpy(data_, &header, sizeof(header));
    for (uint32_t i = 0; i < owners; ++i) new (&owner(i)) Owner{};
    return;
  }
  Header found;
  std::memcpy(&found, data_, sizeof(found));
  if (found.magic == kMagic && found.owners == owners && found.layout == layout) return;
  foreign(found.magic == kMagic ? "is of other owners or shards than this process expects"
                                : "is none");
}

ControlPage::ControlPage(ControlPage&& other) noexcept
    : file_(std::move(other.file_)),
      owners_(other.owners_),
      bytes_(other.bytes_),
      pages_(std::move(other.pages_)),
      data_(std::exchange(other.data_, nullptr)) {}

ControlPage::~ControlPage() = default;

void ControlPage::check_writable() const {
  if (pages_->are_writable()) return;
  throw std::invalid_argument(
      "this process was forked from the one that mapped the control page of tables, and only reads "
      "it: publish in the parent, or attach to the tables in this process");
}

ControlPage::Owner& ControlPage::owner(uint32_t number) const {
  if (number >= owners_) {
    throw std::invalid_argument("owner " + std::to_string(number) + " of " +
                                std::to_string(owners_));
  }
  return reinterpret_cast<Owner*>(data_ + sizeof(Header))[number];
}

void ControlPage::record(uint32_t number, uint64_t generation, const MemoryFileAddress& segment) {
  check_writable();
  Record& record = owner(number).records[generation % 2];
  const auto fd = static_cast<uint32_t>(segment.fd);
  record.process.store(static_cast<uint32_t>(segment.pid) | uint64_t{fd} << 32,
                       std::memory_order_relaxed);
  record.device.store(segment.device, std::memory_order_relaxed);
  record.inode.store(segment.inode, std::memory_order_relaxed);
  record.bytes.store(segment.bytes, std::memory_order_relaxed);
}

MemoryFileAddress ControlPage::recorded(uint32_t number, uint64_t generation) const {
  const Record& record = owner(number).records[generation % 2];
  const uint64_t process = record.process.load(std::memory_order_relaxed);
  return {static_cast<int32_t>(process & std::numeric_limits<uint32_t>::max()),
          static_cast<int32_t>(process >> 32), record.device.load(std::memory_order_relaxed),
          record.inode.load(std::memory_order_relaxed),
          record.bytes.load(std::memory_order_relaxed)};
}

void ControlPage::announce(uint32_t number, uint64_t generation) {
  check_writable();
  owner(number).announced.store(generation, std::memory_order_release);
}

uint64_t ControlPage::announced(uint32_t number) const {
  return owner(number).announced.load(std::memory_order_acquire);
}

uint64_t ControlPage::complete() const {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (uint32_t i = 0; i < owners_; ++i) least = std::min(least, announced(i));
  return least;
}

uint64_t ControlPage::process(uint32_t number) const {
  return owner(number).process.load(std::memory_order_acquire);
}

bool ControlPage::take_over(uint32_t number, uint64_t before, uint64_t next) {
  check_writable();
  return owner(number).process.compare_exchange_strong(before, next, std::memory_order_acq_rel);
}

}  // namespace bls
