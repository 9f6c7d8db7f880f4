#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "host/memory_file.h"
#include "lookup/direct/writable_pages.h"

namespace bls {

/// Which generation of the tables each owner has announced, and where its segments are: shared
/// memory that every process of a model maps, written by owners and read by all.
///
/// An owner records the segment of a generation first and announces the generation last. Records
/// of a generation lie where those of the one before the last one lay, so that a reader who is slow
/// may find a newer record, or a half of one. It need not know: whatever is recorded is the address
/// of a segment that says itself whose it is and of which generation, and is checked for that.
class ControlPage {
 public:
  using Digest = std::array<std::byte, 32>;

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

  /// The methods below throw std::invalid_argument for an owner that there is none of, and those
  /// that write throw it in a forked child, which only reads.

  /// Says where the segment of a generation is that `announce` will name.
  void record(uint32_t owner, uint64_t generation, const MemoryFileAddress& segment);
  /// What was recorded last in the place of a generation.
  MemoryFileAddress recorded(uint32_t owner, uint64_t generation) const;
  /// Makes a generation known, with all that this thread has done before.
  void announce(uint32_t owner, uint64_t generation);
  /// The last one; 0 before the first.
  uint64_t announced(uint32_t owner) const;
  /// The last generation that all owners have announced. All that they did before is seen.
  uint64_t complete() const;

  /// The process that publishes for an owner, by a number that tells it from all other processes;
  /// 0: nobody.
  uint64_t process(uint32_t owner) const;
  /// Puts `next` in the place of `before`. False: it was another one.
  bool take_over(uint32_t owner, uint64_t before, uint64_t next);

  int descriptor() const { return file_.get(); }
  MemoryFileAddress address() const { return address_of(file_.get()); }

 private:
  struct Owner;

  ControlPage(Descriptor file, uint32_t owners, const Digest& layout, bool is_new);
  Owner& owner(uint32_t number) const;
  void check_writable() const;

  Descriptor file_;
  uint32_t owners_ = 0;
  size_t bytes_ = 0;
  std::unique_ptr<WritablePages> pages_;  // they stay where they are when the page moves
  std::byte* data_ = nullptr;
};

}  // namespace bls
