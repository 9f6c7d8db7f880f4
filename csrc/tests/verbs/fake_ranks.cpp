#include "tests/verbs/fake_ranks.h"

#include <chrono>
#include <thread>

namespace bls::testing {

FakeRanks::FakeRanks(const Setup& setup, const FakeDevice& device, uint64_t seed)
    : library(std::make_shared<FakeIbverbs>(std::vector{device}, seed)) {
  Transports transports;
  for (auto& rank : connected(library, setup)) {
    addresses.push_back(rank->address());
    contexts.push_back(rank->device().context());
    transports.push_back(std::move(rank));
  }
  ranks = std::make_unique<Ranks>(setup, std::move(transports));
}

void await_poison(Transport& rank) {
  const auto end = Clock::now() + std::chrono::minutes(2);
  while (rank.poisoned().load() == 0 && Clock::now() < end) std::this_thread::yield();
}

void check_poisoned(FakeRanks& ranks, int rank, const std::string& text) {
  await_poison(ranks.ranks->transport(rank));
  check_failure(failure_of([&] { post_text(ranks[rank]); }), ErrorKind::kPoisoned, text);
}

std::byte* leave_outbox_in_use(FakeRanks& ranks) {
  for (int i = 0; i < 2; ++i) {
    for (int rank = 0; rank < 2; ++rank) post_text(ranks[rank], std::to_string(i));
    for (int rank = 0; rank < 2; ++rank) {
      ranks.ranks->arrived(rank, 1 - rank, static_cast<uint64_t>(i));
      ranks[rank].wait();
      ranks[rank].release();
    }
  }
  Transport& transport = ranks.ranks->transport(0);
  std::byte* const slot = transport.outbox(1, 0);
  ranks.library->hold(ranks.pair(0, 1), true);
  transport.deliver(1, slot, 64, 2);
  return slot;
}

}  // namespace bls::testing
