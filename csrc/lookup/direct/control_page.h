#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/memory_file.h"
#include "lookup/direct/reader_slots.h"
#include "lookup/direct/writable_pages.h"

namespace bls {

/// Which version of the tables serves, which one each owner has announced, and where the segments
/// are: shared memory that every process of a model maps, written by owners and read by all.
///
/// Versions that serve have a serial number, counted from 1. One word says which one serves now. An
/// owner with something pending has announced a version for the next serial. As soon as all owners
/// have announced the same one, any of them makes it serve, by one compare-and-swap of that word.
/// An owner may withdraw what it has announced until then: the word counts withdrawals too, so that
/// who decides from what it saw before a withdrawal fails.
///
/// Of the two records of an owner one is of the version that serves. It is not written to while
/// that one serves. A reader looks at the word before and after it reads a record.
///
/// Behind the owners the page has a slot for each process that reads.
///
/// Tables that are refreshed by row have two copies, on two sides. The page says which version each
/// side has; nothing else can know it. Their keeper takes a version off before it writes there.
class ControlPage {
 public:
  using Digest = std::array<std::byte, 32>;

  /// A version, and the serial that it serves with or would serve with.
  struct Version {
    uint64_t serial = 0;
    std::string name;  ///< empty: none
  };

  /// A version and its segment.
  struct Recorded {
    std::string name;
    MemoryFileAddress segment;
  };

  /// Makes the page of `owners` ranks, whose layouts have this digest. Throws ChannelError without
  /// memory, std::invalid_argument without owners.
  static ControlPage create(uint32_t owners, const Digest& layout);
  /// Maps the page that another process made. Throws ChannelError if it is not there any more, or
  /// is none for this layout.
  static ControlPage open(const MemoryFileAddress& address, uint32_t owners, const Digest& layout);
  /// Maps a descriptor that came through a socket, and owns it from here on. Throws as `open`.
  static ControlPage adopt(Descriptor file, uint32_t owners, const Digest& layout);

  ControlPage(ControlPage&& other) noexcept;
  ControlPage& operator=(ControlPage&&) = delete;
  ~ControlPage();

  /// Serial of the version that serves; 0 before the first. All that owners did before they
  /// announced it is seen.
  uint64_t serial() const;
  /// The version that serves. Throws ChannelError if the page holds what is no version.
  Version serving() const;

  /// The methods below throw std::invalid_argument for an owner that there is none of, and
  /// std::out_of_range for a side. Those that write throw std::invalid_argument in a forked child,
  /// which only reads.

  /// Says which version an owner has for a serial, and where its segment is. Overwrites the record
  /// that is not of the serial before. Throws std::invalid_argument for what is no version.
  void record(uint32_t owner, uint64_t serial, const std::string& version,
              const MemoryFileAddress& segment);
  /// What an owner has recorded for a serial; nothing if it has none, or another one by now. Throws
  /// ChannelError if the page holds what is no version.
  std::optional<Recorded> recorded(uint32_t owner, uint64_t serial) const;

  /// Makes what the owner recorded for a serial known, with all that this thread has done before,
  /// and settles. Throws std::invalid_argument if nothing is recorded, or the serial is not next.
  void announce(uint32_t owner, uint64_t serial);
  /// What an owner has announced and does not serve yet; empty if there is nothing.
  Version pending(uint32_t owner) const;
  /// Takes back what the owner has pending. False: it serves, since all have announced it.
  bool withdraw(uint32_t owner);
  /// What an owner withdrew last; empty if that is nothing.
  Version withdrawn(uint32_t owner) const;
  /// Makes what all owners have announced serve. Does nothing if they have announced nothing, or
  /// different versions.
  void settle();

  /// The process that publishes for an owner, by a number that tells it from all other processes;
  /// 0: nobody.
  uint64_t process(uint32_t owner) const;
  /// Puts `next` in the place of `before`. False: it was another one.
  bool take_over(uint32_t owner, uint64_t before, uint64_t next);

  /// Says that an owner has shared its tables anew elsewhere, and publishes nothing here any more.
  void abandon(uint32_t owner);
  /// Which owner has said so first.
  std::optional<uint32_t> abandoned_by() const;

  /// Serial of the version that a side has; 0: none. Whoever has pinned the side, and then finds
  /// its version here, sees all of it and no later one until the pin is gone: see ReaderSlot::pin.
  uint64_t serial_on(uint32_t side) const;
  /// Says which version a side has, with all that this thread has done before. The keeper says 0
  /// before it writes there, and then waits until `holders` are gone.
  void set_serial_on(uint32_t side, uint64_t serial);
  /// The processes that have pinned a side, and may be dead.
  std::vector<uint64_t> holders(uint32_t side) const { return slots().holders(side); }

  /// The processes that have said that they read, and may be dead.
  std::vector<TableReader> readers() const;
  /// The slots, to write to.
  ReaderSlots& reader_slots();

  /// False in a forked child, for a page that it has not mapped itself.
  bool is_writable() const { return pages_->are_writable(); }

  int descriptor() const { return file_.get(); }
  MemoryFileAddress address() const { return address_of(file_.get()); }

 private:
  struct Header;
  struct Owner;

  static size_t bytes_of(uint32_t owners);
  ControlPage(Descriptor file, uint32_t owners, const Digest& layout, bool is_new);
  Header& header() const;
  Owner& owner(uint32_t number) const;
  ReaderSlots& slots() const;
  void check_writable() const;

  Descriptor file_;
  uint32_t owners_ = 0;
  size_t bytes_ = 0;
  std::unique_ptr<WritablePages> pages_;  // they stay where they are when the page moves
  std::byte* data_ = nullptr;
};

}  // namespace bls
