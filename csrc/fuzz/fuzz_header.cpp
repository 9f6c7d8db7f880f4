// The header in a slot: both readers must stay inside the slot and agree.

#include "channel/protocol.h"
#include "fuzz/input.h"

namespace bls::fuzzing {
namespace {

constexpr int kSource = 3;

/// Without them hardly any input gets beyond the first comparisons.
void write_constants(std::byte* slot) {
  MessageHeader header;
  std::memcpy(&header, slot, sizeof(header));
  header.magic = kMagic;
  header.version = kWireVersion;
  header.source = kSource;
  header.parts %= kMaxParts + 2;
  std::memcpy(slot, &header, sizeof(header));
}

void check_agreement(const View (&views)[kMaxParts], size_t parts, uint32_t credit,
                     const ParsedMessage& message, const std::byte* slot) {
  require(!message.pulled, "a pulled message was read in its slot");
  require(parts == message.layout.count, "number of parts");
  require(credit == message.credit, "credit");
  for (size_t i = 0; i < parts; ++i) {
    require(views[i].data == slot + message.layout.offset[i], "start of a part");
    require(views[i].bytes == message.layout.bytes[i], "bytes of a part");
    touch(views[i]);
  }
}

void check_layout(const PartLayout& layout, uint64_t start, uint64_t room) {
  uint64_t at = start;
  for (size_t i = 0; i < layout.count; ++i) {
    require(layout.offset[i] >= at, "parts overlap");
    at = layout.offset[i] + layout.bytes[i];
    require(at >= layout.offset[i] && at <= room, "a part ends behind its memory");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const size_t slot_bytes = kMinSlotBytes + input.take<uint16_t>() % 4096;
  const bool likely = input.take<uint8_t>() % 4 != 0;
  std::vector<std::byte> slot = input.take_bytes(slot_bytes);
  if (likely) write_constants(slot.data());
  const Expectation expected{.source = kSource, .slot_bytes = slot_bytes};

  View views[kMaxParts];
  size_t parts = 0;
  uint32_t credit = 0;
  uint32_t label;
  std::memcpy(&label, slot.data() + offsetof(MessageHeader, label), sizeof(label));
  if (input.take<uint8_t>() % 4 == 0) label = 0;
  const bool in_slot =
      parse_in_slot(slot.data(), expected.source, expected.slot_bytes, label, views, parts, credit);
  ParsedMessage message;
  const bool sound = accepts([&] { parse_message(slot.data(), expected, message); });
  require(in_slot == (sound && !message.pulled && message.label == label),
          "one reader accepts what the other refuses");
  if (in_slot) check_agreement(views, parts, credit, message, slot.data());
  if (sound && message.pulled) check_layout(message.layout, 0, message.address.bytes);
  if (in_slot) check_layout(message.layout, header_bytes(parts), slot_bytes);
  return 0;
}

}  // namespace bls::fuzzing
