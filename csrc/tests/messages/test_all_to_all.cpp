#include <doctest/doctest.h>

#include <algorithm>

#include "messages/all_to_all.h"
#include "tests/support/payload.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// Consecutive buffers of `sizes` in `memory`, which gets the size of all.
std::vector<Buffer> consecutive(Bytes& memory, const std::vector<size_t>& sizes) {
  size_t total = 0;
  for (const size_t size : sizes) total += size;
  memory.resize(total);
  std::vector<Buffer> buffers;
  std::byte* at = memory.data();
  for (const size_t size : sizes) {
    buffers.push_back({at, size});
    at += size;
  }
  return buffers;
}

/// Bytes that `source` sends to `destination`: some none, some more than a slot.
size_t size_of(int source, int destination) {
  return static_cast<size_t>((source + 2 * destination) % 4) * 700;
}

}  // namespace

TEST_CASE("buffers reach the ranks and places that they are for") {
  constexpr int world_size = 4;
  Ranks ranks({.world_size = world_size, .slot_bytes = 1024});
  REQUIRE_NOTHROW(ranks.run([&](int rank, Channel& channel) {
    for (int round = 0; round < 3; ++round) {
      std::vector<size_t> sent, received;
      for (int peer = 0; peer < world_size; ++peer) {
        sent.push_back(size_of(rank, peer));
        received.push_back(size_of(peer, rank));
      }
      Bytes input, output;
      const std::vector<Buffer> from = consecutive(input, sent);
      const std::vector<Buffer> to = consecutive(output, received);
      for (int peer = 0; peer < world_size; ++peer) {
        const Bytes bytes = stamped(static_cast<uint64_t>(rank * 100 + peer * 10 + round),
                                    sent[static_cast<size_t>(peer)]);
        std::copy(bytes.begin(), bytes.end(), from[static_cast<size_t>(peer)].data);
      }
      post_buffers(channel, from);
      collect_buffers(channel.wait(), to);
      channel.release();
      for (int peer = 0; peer < world_size; ++peer) {
        const Buffer& buffer = to[static_cast<size_t>(peer)];
        const Bytes expected =
            stamped(static_cast<uint64_t>(peer * 100 + rank * 10 + round), size_of(peer, rank));
        expect(std::equal(expected.begin(), expected.end(), buffer.data), "message of a peer");
      }
    }
  }));
}

TEST_CASE("a message of another size than its buffer is refused and nothing is copied") {
  Ranks ranks({});
  Bytes input, output;
  for (int rank = 0; rank < 2; ++rank) post_buffers(ranks[rank], consecutive(input, {8, 8}));
  const std::vector<Buffer> to = consecutive(output, {8, 9});
  const Bytes before = output;
  const auto failure = failure_of([&] { collect_buffers(ranks[0].wait(), to); });
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK_MESSAGE(failure->message.find("rank 1 sent 8 bytes, but this rank's output has room for 9 "
                                      "from it") == 0,
                failure->message);
  CHECK(output == before);
}
