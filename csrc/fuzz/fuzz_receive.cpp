// Whole messages from a hostile peer, overflow descriptors included, as Channel::wait reads them.

#include <bit>

#include "channel/channel.h"
#include "fuzz/input.h"
#include "tests/support/ranks.h"
#include "transport/shm/shm_segment.h"

namespace bls::fuzzing {
namespace {

constexpr size_t kSlotBytes = 512;
constexpr size_t kMostExposed = 8192;
constexpr uint64_t kMessages = 6;

/// Any bytes behind the arrival word.
void write_raw(Input& input, std::byte* slot) {
  const std::vector<std::byte> bytes = input.take_bytes(kSlotBytes - sizeof(uint64_t));
  std::memcpy(slot + sizeof(uint64_t), bytes.data(), bytes.size());
}

/// A sound header with arbitrary sizes, in whose other fields some bits may be wrong.
void write_header(Input& input, Transport& transport, uint32_t slot, uint64_t sequence) {
  MessageHeader header{};
  header.magic = kMagic;
  header.version = kWireVersion;
  header.source = 1;
  header.credit = static_cast<uint32_t>(sequence) + input.take<int8_t>();
  header.parts = static_cast<uint16_t>(input.take_up_to(kMaxParts));
  const auto mode = input.take<uint8_t>();
  header.flags = mode & 1;
  if (mode & 2) header.flags ^= input.take<uint8_t>();
  if (mode & 4) header.source ^= input.take<uint16_t>();
  std::byte* const to = transport.outbox(0, slot);
  const uint64_t arrival = header.arrival;
  std::memcpy(to + sizeof(arrival), reinterpret_cast<std::byte*>(&header) + sizeof(arrival),
              sizeof(header) - sizeof(arrival));
  for (size_t i = 0; i < header.parts; ++i) {
    const uint64_t bytes = mode & 8 ? input.take<uint64_t>() : input.take<uint8_t>();
    std::memcpy(to + header_bytes(i), &bytes, sizeof(bytes));
  }
  if ((header.flags & kFlagPulled) == 0) return;
  MemoryAddress exposed;
  transport.expose(0, slot, 1 + input.take<uint16_t>() % kMostExposed, exposed);
  auto address = std::bit_cast<SegmentAddress>(exposed);
  const auto wrong = input.take<uint8_t>();
  if (wrong & 1) address.pid = input.take<int8_t>();
  if (wrong & 2) address.fd = input.take<int32_t>();
  if (wrong & 4) address.device ^= input.take<uint64_t>();
  if (wrong & 8) address.inode ^= input.take<uint64_t>();
  if (wrong & 16) address.bytes ^= input.take<uint64_t>();
  std::memcpy(to + header_bytes(header.parts), &address, sizeof(address));
}

/// An honest rank 0 reads message after message until it refuses one.
void exchange(Input input) {
  testing::Ranks ranks({.slot_bytes = kSlotBytes});
  Channel& honest = ranks[0];
  Transport& hostile = ranks.transport(1);
  const Message nothing[2];
  for (uint64_t sequence = 0; sequence < kMessages && !input.empty(); ++sequence) {
    const auto slot = static_cast<uint32_t>(sequence % honest.config().slots);
    const auto kind = input.take<uint8_t>();
    if (kind & 1) {
      write_raw(input, hostile.outbox(0, slot));
    } else {
      write_header(input, hostile, slot, sequence);
    }
    honest.post(nothing);
    hostile.deliver(0, hostile.outbox(0, slot), kSlotBytes,
                    kind & 0x80 ? sequence + input.take<uint32_t>() : sequence);
    const bool accepted = accepts([&] {
      for (const View& view : honest.wait().parts(1)) touch(view);
    });
    require(accepted != hostile.poisoned(), "an error is known to all ranks, nothing else is");
    if (!accepted) break;
    honest.release();
    // The next post must find its slot free.
    hostile.return_credit(0, sequence + 1);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int before = next_descriptor();
  exchange(Input(data, size));
  require(next_descriptor() == before, "a descriptor was left open");
  return 0;
}

}  // namespace bls::fuzzing
