#include "tests/support/ranks.h"

#include <stdexcept>
#include <thread>

#include "tests/support/heap_transport.h"

namespace bls::testing {

std::vector<std::unique_ptr<ShmTransport>> shm_mesh(const Setup& setup) {
  std::vector<std::unique_ptr<ShmTransport>> ranks;
  std::vector<SegmentAddress> addresses;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    ranks.push_back(std::make_unique<ShmTransport>(
        RingShape{rank, setup.world_size, setup.slot_count(), setup.slot_bytes}));
    addresses.push_back(ranks.back()->address());
  }
  for (auto& rank : ranks) rank->connect(addresses);
  for (auto& rank : ranks) rank->seal();
  return ranks;
}

Transports shm_transports(const Setup& setup) {
  Transports transports;
  for (auto& rank : shm_mesh(setup)) transports.push_back(std::move(rank));
  return transports;
}

Transports heap_transports(const Setup& setup) {
  const auto mesh =
      std::make_shared<HeapMesh>(setup.world_size, setup.slot_count(), setup.slot_bytes);
  Transports transports;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    transports.push_back(std::make_unique<HeapTransport>(mesh, rank));
  }
  return transports;
}

MakeTransports& default_transports() {
  static MakeTransports make = shm_transports;
  return make;
}

Ranks::Ranks(const Setup& setup, Transports transports) {
  for (int rank = 0; rank < setup.world_size; ++rank) {
    auto& transport = transports[static_cast<size_t>(rank)];
    transports_.push_back(transport.get());
    channels_.push_back(std::make_unique<Channel>(
        std::move(transport),
        ChannelConfig{rank, setup.world_size, setup.bound, setup.slot_count(), setup.deadline,
                      "tested", setup.world_size, rank == 0 ? setup.interrupt : Interrupt{}}));
  }
}

std::byte* Ranks::arrived(int rank, int source, uint64_t sequence) {
  const auto slots = (*this)[rank].config().slots;
  std::byte* const slot = transport(rank).inbox(source, static_cast<uint32_t>(sequence % slots));
  const auto end = Clock::now() + std::chrono::minutes(2);
  while (arrival_word(slot).load() != sequence + 1) {
    if (Clock::now() > end) throw std::runtime_error("a message did not arrive");
    transport(rank).progress();
    std::this_thread::yield();
  }
  return slot;
}

std::vector<std::optional<Failure>> Ranks::outcomes(const Body& body) {
  std::vector<std::optional<Failure>> failures(channels_.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size(); ++rank) {
    threads.emplace_back([&, rank] {
      Channel& channel = (*this)[rank];
      auto& failure = failures[static_cast<size_t>(rank)];
      failure = failure_of([&] { body(rank, channel); });
      // The others must not wait for a rank whose test failed.
      if (failure && !failure->kind) channel.poison(failure->message);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

void Ranks::run(const Body& body) {
  std::string text;
  for (const auto& failure : outcomes(body)) {
    if (failure) text += failure->message + "\n";
  }
  if (!text.empty()) throw std::runtime_error(text);
}

std::optional<Failure> failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ChannelError& error) {
    return Failure{error.kind(), error.what()};
  } catch (const std::exception& error) {
    return Failure{std::nullopt, error.what()};
  }
  return std::nullopt;
}

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

}  // namespace bls::testing
