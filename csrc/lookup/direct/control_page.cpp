#include "lookup/direct/control_page.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "lookup/direct/version_name.h"

namespace bls {
namespace {

constexpr uint64_t kMagic = 0x3430'6765'6E62'6274;   // "tbbneg04"
constexpr uint64_t kFamily = 0x0000'6765'6E62'6274;  // "tbbneg" of any version
constexpr uint64_t kFamilyBits = 0x0000'FFFF'FFFF'FFFF;
constexpr size_t kCacheLine = 64;

// The word that decides: the serial of what serves, above a count of withdrawals.
constexpr int kSerialShift = 32;
constexpr uint64_t kWithdrawals = (uint64_t{1} << kSerialShift) - 1;

// The word of an owner, which never repeats: a count of stores, the place of the record, and
// whether that is announced.
constexpr uint64_t kStore = 4, kPlace = 2, kAnnounced = 1;

using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free, "a lock of one process is no other's");

/// A name of which other processes may see a half.
struct Name {
  Word length;
  std::array<Word, kLongestVersion / sizeof(uint64_t)> words;
};

struct Record {
  Word serial;
  Name version;
  Word process;  // pid, and the descriptor in the upper half
  Word device;
  Word inode;
  Word bytes;
};

// Acquire and release keep the words of a record between those that tell whether it has changed.
void store(Word& word, uint64_t value) { word.store(value, std::memory_order_release); }
uint64_t load(const Word& word) { return word.load(std::memory_order_acquire); }

void write(Name& name, const std::string& text) {
  std::array<char, kLongestVersion> padded = {};
  std::memcpy(padded.data(), text.data(), text.size());
  for (size_t i = 0; i < name.words.size(); ++i) {
    uint64_t word;
    std::memcpy(&word, padded.data() + i * sizeof(word), sizeof(word));
    store(name.words[i], word);
  }
  store(name.length, text.size());
}

/// Any bytes, of which `checked` says whether they are a version's.
std::string read(const Name& name) {
  std::array<char, kLongestVersion> padded = {};
  for (size_t i = 0; i < name.words.size(); ++i) {
    const uint64_t word = load(name.words[i]);
    std::memcpy(padded.data() + i * sizeof(word), &word, sizeof(word));
  }
  return {padded.data(), std::min<uint64_t>(load(name.length), padded.size())};
}

[[noreturn]] void foreign(const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol,
                     "the shared memory that was announced as the control page of tables " + what +
                         ". Shard the same model by the same plan on every rank, with one version "
                         "of torchrec-bls");
}

const std::string& checked(const std::string& version) {
  if (!is_version(version)) foreign("names a version by other than 1 to 64 bytes of UTF-8");
  return version;
}

struct Withdrawn {
  Word stamp;  // odd while it is written to
  Word serial;
  Name version;

  void say(uint64_t given_up, const std::string& name) {
    store(stamp, load(stamp) | 1);  // one that died while it wrote has left it odd
    store(serial, given_up);
    write(version, name);
    store(stamp, load(stamp) + 1);
  }
};

uint64_t serial_of(uint64_t decided) { return decided >> kSerialShift; }

}  // namespace

struct alignas(kCacheLine) ControlPage::Header {
  uint64_t magic;
  uint32_t owners;
  uint32_t unused;
  ControlPage::Digest layout;
  Word abandoned;  // owner + 1
  Word decided;
  // Each forward of each process reads them, and only their keeper writes there.
  alignas(kCacheLine) std::array<Word, ReaderSlots::kSides> sides;
};

struct alignas(kCacheLine) ControlPage::Owner {
  Word announced;
  Word process;
  std::array<Record, 2> records;
  Withdrawn withdrawn;

  /// The record of a serial; null if there is none.
  Record* of(uint64_t serial) {
    for (Record& record : records) {
      if (load(record.serial) == serial) return &record;
    }
    return nullptr;
  }

  void announce(uint64_t place, uint64_t whether) {
    const uint64_t stores = load(announced) / kStore + 1;
    announced.store(stores * kStore | place * kPlace | whether);
  }
};

size_t ControlPage::bytes_of(uint32_t owners) {
  return sizeof(Header) + owners * sizeof(Owner) + sizeof(ReaderSlots);
}

ControlPage ControlPage::create(uint32_t owners, const Digest& layout) {
  if (owners == 0) throw std::invalid_argument("a control page of no owners");
  const MemoryPurpose purpose{"the control page of tables", "Free some memory"};
  Descriptor file = create_memory_file(bytes_of(owners), purpose);
  seal_memory_file(file.get(), Seal::kSize, purpose);
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
    : file_(std::move(file)), owners_(owners), bytes_(bytes_of(owners)) {
  uint64_t magic = 0;  // before the size, which another version has another one of
  if (!is_new && pread(file_.get(), &magic, sizeof(magic), 0) == sizeof(magic) && magic != kMagic &&
      (magic & kFamilyBits) == kFamily) {
    foreign("is of another version of torchrec-bls");
  }
  if (!is_sealed(file_.get(), bytes_, Seal::kSize)) foreign("is not sealed, or of another size");
  pages_ = std::make_unique<WritablePages>(file_.get(), bytes_, "the control page of tables");
  data_ = pages_->data();
  if (is_new) {
    new (data_) Header{kMagic, owners, 0, layout, {}, {}, {}};
    for (uint32_t i = 0; i < owners; ++i) new (&owner(i)) Owner{};
    new (&slots()) ReaderSlots{};
    return;
  }
  const Header& found = header();
  const bool has_magic = found.magic == kMagic;
  if (has_magic && found.owners == owners && found.layout == layout) return;
  foreign(has_magic ? "is of other owners or shards than this process expects" : "is none");
}

ControlPage::ControlPage(ControlPage&& other) noexcept
    : file_(std::move(other.file_)),
      owners_(other.owners_),
      bytes_(other.bytes_),
      pages_(std::move(other.pages_)),
      data_(std::exchange(other.data_, nullptr)) {}

ControlPage::~ControlPage() = default;

void ControlPage::check_writable() const {
  if (is_writable()) return;
  throw std::invalid_argument(
      "this process was forked from the one that mapped the control page of tables, and only reads "
      "it: publish in the parent, or attach to the tables in this process");
}

ControlPage::Header& ControlPage::header() const { return *reinterpret_cast<Header*>(data_); }

ControlPage::Owner& ControlPage::owner(uint32_t number) const {
  if (number >= owners_) {
    throw std::invalid_argument("owner " + std::to_string(number) + " of " +
                                std::to_string(owners_));
  }
  return reinterpret_cast<Owner*>(data_ + sizeof(Header))[number];
}

ReaderSlots& ControlPage::slots() const {
  return *reinterpret_cast<ReaderSlots*>(data_ + sizeof(Header) + owners_ * sizeof(Owner));
}

uint64_t ControlPage::serial() const { return serial_of(header().decided.load()); }

ControlPage::Version ControlPage::serving() const {
  while (true) {
    const uint64_t now = serial();
    if (now == 0) return {};
    const std::optional<Recorded> found = recorded(0, now);
    if (found) return {now, found->name};
    if (now == serial()) foreign("has no record of what serves");
  }
}

void ControlPage::record(uint32_t number, uint64_t serial, const std::string& version,
                         const MemoryFileAddress& segment) {
  if (!is_version(version)) throw std::invalid_argument("what is recorded is no version");
  std::array<Record, 2>& records = owner(number).records;
  Record& record = records[load(records[0].serial) == serial - 1 ? 1 : 0];
  store(record.serial, serial);
  write(record.version, version);
  const auto fd = static_cast<uint32_t>(segment.fd);
  store(record.process, static_cast<uint32_t>(segment.pid) | uint64_t{fd} << 32);
  store(record.device, segment.device);
  store(record.inode, segment.inode);
  store(record.bytes, segment.bytes);
}

std::optional<ControlPage::Recorded> ControlPage::recorded(uint32_t number, uint64_t serial) const {
  const Record* const record = owner(number).of(serial);
  if (record == nullptr || serial == 0) return std::nullopt;
  const uint64_t process = load(record->process);
  const Recorded found{read(record->version),
                       {static_cast<int32_t>(process & std::numeric_limits<uint32_t>::max()),
                        static_cast<int32_t>(process >> 32), load(record->device),
                        load(record->inode), load(record->bytes)}};
  if (load(record->serial) != serial || this->serial() > serial) return std::nullopt;
  checked(found.name);
  return found;
}

void ControlPage::announce(uint32_t number, uint64_t serial) {
  check_writable();
  Owner& of = owner(number);
  Record* const record = of.of(serial);
  if (serial != this->serial() + 1 || record == nullptr) {
    throw std::invalid_argument("nothing is recorded for serial " + std::to_string(serial) +
                                ", or it is not the next one");
  }
  const Version given_up = withdrawn(number);
  if (given_up.serial == serial && given_up.name == read(record->version)) of.withdrawn.say(0, "");
  of.announce(static_cast<uint64_t>(record - of.records.data()), kAnnounced);
  settle();
}

ControlPage::Version ControlPage::pending(uint32_t number) const {
  const Owner& of = owner(number);
  while (true) {
    const uint64_t word = of.announced.load();
    if ((word & kAnnounced) == 0) return {};
    const Record& record = of.records[(word & kPlace) / kPlace];
    Version found{load(record.serial), read(record.version)};
    if (of.announced.load() != word) continue;
    if (found.serial != serial() + 1) return {};
    checked(found.name);
    return found;
  }
}

bool ControlPage::withdraw(uint32_t number) {
  check_writable();
  Owner& of = owner(number);
  const Version given_up = pending(number);
  if (given_up.name.empty()) return (load(of.announced) & kAnnounced) == 0;
  of.withdrawn.say(given_up.serial, given_up.name);
  of.announce((load(of.announced) & kPlace) / kPlace, 0);
  Word& decided = header().decided;
  uint64_t found = decided.load();
  while (serial_of(found) < given_up.serial) {
    const uint64_t next = (found & ~kWithdrawals) | ((found + 1) & kWithdrawals);
    if (decided.compare_exchange_weak(found, next)) return true;
  }
  of.withdrawn.say(0, "");
  return false;
}

ControlPage::Version ControlPage::withdrawn(uint32_t number) const {
  const Withdrawn& said = owner(number).withdrawn;
  const uint64_t stamp = load(said.stamp);
  if (stamp % 2 != 0) return {};
  Version found{load(said.serial), read(said.version)};
  if (load(said.stamp) != stamp || found.name.empty()) return {};
  checked(found.name);
  return found;
}

void ControlPage::settle() {
  check_writable();
  Word& decided = header().decided;
  uint64_t found = decided.load();
  while (true) {
    const uint64_t next = serial_of(found) + 1;
    std::string version;
    for (uint32_t i = 0; i < owners_; ++i) {
      const Version announced = pending(i);
      if (announced.name.empty() || announced.serial != next) return;
      if (i > 0 && announced.name != version) return;
      version = announced.name;
    }
    if (decided.compare_exchange_strong(found, next << kSerialShift)) return;
  }
}

uint64_t ControlPage::process(uint32_t number) const {
  return owner(number).process.load(std::memory_order_acquire);
}

bool ControlPage::take_over(uint32_t number, uint64_t before, uint64_t next) {
  check_writable();
  return owner(number).process.compare_exchange_strong(before, next, std::memory_order_acq_rel);
}

void ControlPage::abandon(uint32_t number) {
  check_writable();
  owner(number);
  uint64_t nobody = 0;
  header().abandoned.compare_exchange_strong(nobody, uint64_t{number} + 1);
}

std::optional<uint32_t> ControlPage::abandoned_by() const {
  const uint64_t word = load(header().abandoned);
  if (word == 0) return std::nullopt;
  return static_cast<uint32_t>(word - 1);
}

uint64_t ControlPage::serial_on(uint32_t side) const {
  return header().sides.at(side).load(std::memory_order_seq_cst);
}

void ControlPage::set_serial_on(uint32_t side, uint64_t serial) {
  check_writable();
  header().sides.at(side).store(serial, std::memory_order_seq_cst);
}

std::vector<TableReader> ControlPage::readers() const { return slots().readers(); }

ReaderSlots& ControlPage::reader_slots() {
  check_writable();
  return slots();
}

}  // namespace bls
