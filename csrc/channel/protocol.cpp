#include "channel/protocol.h"

#include <cstring>
#include <stdexcept>

#include "errors.h"

namespace bls {
namespace {

[[noreturn]] void damaged(const std::string& what) {
  throw ChannelError(ErrorKind::kProtocol, "damaged header: " + what);
}

}  // namespace

void parse_message(const std::byte* slot, const Expectation& expected, ParsedMessage& message) {
  MessageHeader header;
  std::memcpy(&header, slot, sizeof(header));
  if (header.magic != kMagic) damaged("magic " + std::to_string(header.magic));
  if (header.version != kWireVersion) {
    damaged("wire version " + std::to_string(header.version) + ", this rank speaks " +
            std::to_string(kWireVersion) + ": install one version on all ranks");
  }
  if (header.source != expected.source) {
    damaged("it says it comes from rank " + std::to_string(header.source) + " of the group");
  }
  if ((header.flags & ~kFlagPulled) != 0) damaged("unknown flags");
  if (header.parts > kMaxParts) {
    damaged(std::to_string(header.parts) + " parts, at most " + std::to_string(kMaxParts) +
            " exist");
  }
  message.credit = header.credit;
  message.label = header.label;
  message.pulled = (header.flags & kFlagPulled) != 0;
  PartLayout& layout = message.layout;
  layout.count = header.parts;
  std::memcpy(layout.bytes.data(), slot + sizeof(header), header.parts * sizeof(uint64_t));
  try {
    layout.place(message.pulled ? 0 : header_bytes(layout.count));
  } catch (const std::length_error& error) {
    damaged(error.what());
  }
  if (!message.pulled) {
    if (layout.end > expected.slot_bytes) {
      damaged(std::to_string(layout.end) + " bytes in a slot of " +
              std::to_string(expected.slot_bytes));
    }
    return;
  }
  std::memcpy(&message.address, slot + header_bytes(layout.count), sizeof(MemoryAddress));
  if (message.address.bytes < layout.end) {
    damaged(std::to_string(layout.end) + " bytes in a pulled message's memory of " +
            std::to_string(message.address.bytes));
  }
}

}  // namespace bls
