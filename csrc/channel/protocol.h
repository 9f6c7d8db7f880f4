#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "channel/message_layout.h"
#include "transport/transport.h"

namespace bls {

/// A message in a slot (little-endian, as all supported hosts are):
///
///     MessageHeader | uint64 bytes of each part | MemoryAddress if pulled | parts
///
/// Parts are aligned from the slot's start (align_part). A pulled message keeps its parts, laid out
/// by the same rule from offset 0, in memory of the sender.
struct MessageHeader {
  uint64_t arrival;  ///< sequence number plus one; written last, see Transport
  uint16_t magic;
  uint8_t version;
  uint8_t flags;
  uint16_t source;
  uint16_t parts;
  uint32_t credit;  ///< low bits of how many messages of the receiver the sender has read
  uint32_t label;   ///< the call that the message belongs to, see Channel::label
};
static_assert(sizeof(MessageHeader) == 24);

inline constexpr uint16_t kMagic = 0xB15A;
inline constexpr uint8_t kWireVersion = 3;
inline constexpr uint8_t kFlagPulled = 1;
/// A slot must hold the largest header and the address of a pulled message.
inline constexpr size_t kMinSlotBytes = 256;
static_assert(sizeof(MessageHeader) + kMaxParts * sizeof(uint64_t) + sizeof(MemoryAddress) <=
              kMinSlotBytes);

/// Offset of the first byte after the header of a message with `parts` parts.
constexpr size_t header_bytes(size_t parts) {
  return sizeof(MessageHeader) + parts * sizeof(uint64_t);
}

/// Second word of a header, its fields from `magic` to `parts` in one: a header put together field
/// by field and then copied would wait for the store buffer to drain.
constexpr uint64_t header_kind(int source, uint8_t flags, size_t parts) {
  return uint64_t{kMagic} | uint64_t{kWireVersion} << 16 | uint64_t{flags} << 24 |
         uint64_t{static_cast<uint16_t>(source)} << 32 | uint64_t{parts} << 48;
}

/// Writes all of the header but the arrival word, which the transport stores last.
inline void write_header(std::byte* slot, uint64_t kind, uint32_t credit, uint32_t label) {
  const uint64_t counts = uint64_t{credit} | uint64_t{label} << 32;
  std::memcpy(slot + offsetof(MessageHeader, magic), &kind, sizeof(kind));
  std::memcpy(slot + offsetof(MessageHeader, credit), &counts, sizeof(counts));
}

/// The sequence number in a slot, compared with the one that is awaited there. A later one is the
/// work of a broken peer: nobody may send before the slot has been released.
enum class SlotSequence { kEarlier, kAwaited, kLater };

/// Checks a slot's sequence number, before anything else in the slot is read.
inline SlotSequence check_sequence(std::byte* slot, uint64_t awaited) {
  const uint64_t word = arrival_word(slot).load();
  if (word > awaited + 1) [[unlikely]]
    return SlotSequence::kLater;
  return word == awaited + 1 ? SlotSequence::kAwaited : SlotSequence::kEarlier;
}

/// What a receiver checks a header against.
struct Expectation {
  int source;
  size_t slot_bytes;
};

struct ParsedMessage {
  PartLayout layout;
  uint32_t credit = 0;
  uint32_t label = 0;
  bool pulled = false;
  MemoryAddress address;  ///< of a pulled message
};

/// The short way through parse_message for a sound message with `label` that stands in its slot;
/// false for all others.
inline bool parse_in_slot(const std::byte* slot, int source, size_t slot_bytes, uint32_t label,
                          View* views, size_t& parts, uint32_t& credit) {
  uint64_t kind;
  uint64_t counts;
  std::memcpy(&kind, slot + offsetof(MessageHeader, magic), sizeof(kind));
  std::memcpy(&counts, slot + offsetof(MessageHeader, credit), sizeof(counts));
  credit = static_cast<uint32_t>(counts);
  const size_t count = kind >> 48;
  if (kind != header_kind(source, 0, count) || count > kMaxParts || counts >> 32 != label) {
    return false;
  }
  size_t at = header_bytes(count);
  for (size_t i = 0; i < count; ++i) {
    uint64_t bytes;
    std::memcpy(&bytes, slot + header_bytes(i), sizeof(bytes));
    if (bytes > slot_bytes) return false;
    at = align_part(at, bytes);
    views[i] = {slot + at, bytes};
    at += bytes;
    if (at > slot_bytes) return false;
  }
  parts = count;
  return true;
}

/// Reads and checks the header in `slot`; nothing of it is trusted before. Throws
/// ChannelError(kProtocol) naming the field that is wrong.
void parse_message(const std::byte* slot, const Expectation& expected, ParsedMessage& message);

}  // namespace bls
