// What a hostile peer sends over a connection: frames that are right or not, in pieces of any size.

#include <sys/socket.h>

#include "fuzz/input.h"
#include "transport/tcp/tcp_transport.h"

namespace bls::fuzzing {
namespace {

constexpr size_t kSlotBytes = 256;
constexpr uint32_t kSlots = 2;

/// A head in which little is wrong, so that the bytes behind it are read.
FrameHead take_head(Input& input, uint64_t sent) {
  FrameHead head{};
  head.kind = static_cast<FrameKind>(input.take_up_to(7));
  head.bytes = input.take<uint16_t>() % (2 * kSlotBytes);
  head.number = head.kind == FrameKind::kMessage ? sent : input.take<uint8_t>() % 4;
  if (head.kind == FrameKind::kLarge) {
    head.number = sent - 1;
    head.whole = input.take<uint16_t>();
  }
  const auto wrong = input.take<uint8_t>();
  if (wrong == 1) head.number ^= input.take<uint64_t>();
  if (wrong == 2) head.bytes ^= input.take<uint32_t>();
  if (wrong == 3) head.whole ^= input.take<uint64_t>();
  return head;
}

/// Touches what came of a large message, if it is `bytes` long and whole.
void pull(TcpTransport& honest, uint32_t slot, size_t bytes) {
  try {
    touch({honest.pull(1, slot, MemoryAddress{{}, bytes}, bytes), bytes});
  } catch (const ChannelError&) {
  }
}

void exchange(Input input) {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "no pair of sockets");
  const Descriptor hostile(ends[1]);
  std::vector<Descriptor> sockets(2);
  sockets[1] = Descriptor(ends[0]);
  TcpTransport honest(std::move(sockets), RingShape{0, 2, kSlots, kSlotBytes},
                      std::chrono::milliseconds(0));
  uint64_t sent = 0;
  std::vector<std::byte> stream;
  while (!input.empty() && honest.peer_state(1) == PeerState::kOpen) {
    const FrameHead head = take_head(input, sent);
    sent += head.kind == FrameKind::kMessage;
    const auto* const at = reinterpret_cast<const std::byte*>(&head);
    stream.insert(stream.end(), at, at + sizeof(head));
    const std::vector<std::byte> payload =
        input.take_bytes(std::min<size_t>(head.bytes, 4 * kSlotBytes));
    stream.insert(stream.end(), payload.begin(), payload.end());
    // Some of it comes later, and some with the next frame.
    const size_t now = stream.size() - std::min<size_t>(stream.size(), input.take<uint8_t>());
    const ssize_t taken = send(hostile.get(), stream.data(), now, MSG_NOSIGNAL);
    if (taken < 0) break;
    stream.erase(stream.begin(), stream.begin() + taken);
    honest.progress();
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      touch({honest.inbox(1, slot), kSlotBytes});
      pull(honest, slot, input.take<uint16_t>());
    }
  }
  const Poison poison = honest.poison();
  require(honest.poisoned() == 0 || (poison.origin >= 0 && poison.origin < 2),
          "a rank that is none");
  require(poison.message.size() <= kMostPoison, "a longer text than can come");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int before = next_descriptor();
  exchange(Input(data, size));
  require(next_descriptor() == before, "a descriptor was left open");
  return 0;
}

}  // namespace bls::fuzzing
