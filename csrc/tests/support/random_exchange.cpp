#include "tests/support/random_exchange.h"

#include <sched.h>

#include <cstring>
#include <deque>
#include <thread>

namespace bls::testing {
namespace {

void check_message(const Sizes& sizes, const Arrival& arrival, int source, int destination) {
  const auto expected = random_message(sizes, source, destination, arrival.sequence());
  const auto parts = arrival.parts(source);
  const std::string where = "rank " + std::to_string(destination) + ", sequence " +
                            std::to_string(arrival.sequence()) + " from rank " +
                            std::to_string(source) + ": ";
  expect(parts.size() == expected.size(), where + "number of parts");
  for (size_t i = 0; i < parts.size(); ++i) {
    expect(parts[i].bytes == expected[i].size(), where + "length of part " + std::to_string(i));
    expect(expected[i].empty() ||
               std::memcmp(parts[i].data, expected[i].data(), expected[i].size()) == 0,
           where + "bytes of part " + std::to_string(i));
  }
}

void pause_at_random(Random& random) {
  const size_t kind = draw(random, 0, 19);
  if (kind < 6) sched_yield();
  if (kind == 19) std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 1, 300)));
}

}  // namespace

void random_exchange(int rank, Channel& channel, const Sizes& sizes, uint64_t iterations) {
  Random random(static_cast<uint64_t>(rank) * 7919 + iterations);
  const int world_size = channel.config().world_size;
  std::deque<Outgoing> unreleased;
  std::deque<const Arrival*> readable;
  while (channel.released() < iterations) {
    pause_at_random(random);
    const size_t choice = draw(random, 0, 2);
    if (choice == 0 && channel.posted() < iterations &&
        channel.posted() - channel.released() <= channel.config().bound) {
      Outgoing& outgoing = unreleased.emplace_back(world_size);
      for (int peer = 0; peer < world_size; ++peer) {
        for (Bytes& part : random_message(sizes, rank, peer, channel.posted())) {
          if (draw(random, 0, 1) == 0) {
            outgoing.add(peer, std::move(part));
          } else {
            outgoing.add_cut(peer, part, random);
          }
        }
      }
      channel.post(outgoing.messages());
    } else if (choice == 1 && channel.completed() < channel.posted()) {
      readable.push_back(&channel.wait());
      for (int peer = 0; peer < world_size; ++peer) {
        check_message(sizes, *readable.back(), peer, rank);
      }
    } else if (choice == 2 && !readable.empty()) {
      // Nothing may have been overwritten since the wait.
      for (int peer = 0; peer < world_size; ++peer) {
        check_message(sizes, *readable.front(), peer, rank);
      }
      readable.pop_front();
      unreleased.pop_front();
      channel.release();
    }
  }
}

}  // namespace bls::testing
