// The measuring shape that every native all-to-all program shares: options, stamps that prove the
// transfer, timing of single calls and of trains, one JSON line at the end.
#pragma once

#include <getopt.h>
#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ranks.h"

namespace bench {

struct Options {
  int ranks = 2;
  std::size_t bytes = 8;
  double seconds = 0.3;         // aimed-at time of each of the two measurements
  std::size_t repetitions = 0;  // if given, one train of so many calls is all that is measured
};

inline Options parse_options(int argc, char** argv) {
  static constexpr option kNames[] = {{"ranks", required_argument, nullptr, 'r'},
                                      {"bytes", required_argument, nullptr, 'b'},
                                      {"seconds", required_argument, nullptr, 's'},
                                      {"repetitions", required_argument, nullptr, 'n'},
                                      {}};
  Options options;
  for (int name; (name = getopt_long(argc, argv, "", kNames, nullptr)) != -1;) {
    if (name == '?') std::exit(2);
    if (name == 'r') options.ranks = std::atoi(optarg);
    if (name == 'b') options.bytes = std::strtoull(optarg, nullptr, 10);
    if (name == 's') options.seconds = std::atof(optarg);
    if (name == 'n') options.repetitions = std::strtoull(optarg, nullptr, 10);
  }
  if (options.ranks < 2 || options.ranks > kMaxRanks || options.bytes == 0 || options.bytes % 8) {
    std::fprintf(stderr, "need 2 to %d ranks and a positive multiple of 8 bytes\n", kMaxRanks);
    std::exit(2);
  }
  return options;
}

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Peer: exchange() returns when all data can be read, view(source) is that data, release() gives
/// it back, outgoing(destination) is what the next exchange sends.
template <class Peer>
class Measurement {
 public:
  Measurement(Peer& peer, Barrier& barrier, Shared& shared, int rank, const Options& options)
      : peer_(peer), barrier_(barrier), shared_(shared), rank_(rank), options_(options) {
    for (int other = 0; other < options.ranks; ++other)
      if (other != rank) others_.push_back(other);
  }

  // Prints microseconds a call: the slowest rank's, median of the samples.
  void run() {
    for (int round = 0; round < 3; ++round) verify_every_word();
    const double single = options_.repetitions ? 0 : single_calls();
    const double train = options_.repetitions ? one_train() : trains();
    verify_every_word();
    barrier_();
    if (rank_ != 0) return;
    std::printf("{\"one_shot\": {\"median_us\": %.4f}, \"train\": {\"median_us\": %.4f}}\n",
                1e6 * single, 1e6 * train);
    std::fflush(stdout);
  }

 private:
  // Word i of a message is its stamp + i.
  std::uint64_t stamp_of(int source, int destination) const {
    return round_ * 1'000'003 + static_cast<std::uint64_t>(source) * 101 +
           static_cast<std::uint64_t>(destination) + 1;
  }

  // Every `step`th word is written and checked.
  void write(std::size_t step) {
    ++round_;
    for (const int to : others_) {
      for (std::size_t i = 0; i < words(); i += step) {
        const std::uint64_t word = stamp_of(rank_, to) + i;
        std::memcpy(peer_.outgoing(to) + 8 * i, &word, 8);
      }
    }
  }

  void check(std::size_t step) const {
    for (const int from : others_) {
      for (std::size_t i = 0; i < words(); i += step) {
        std::uint64_t found;
        std::memcpy(&found, peer_.view(from) + 8 * i, 8);
        if (found == stamp_of(from, rank_) + i) continue;
        std::fprintf(stderr, "rank %d: word %zu from rank %d is wrong\n", rank_, i, from);
        std::_Exit(3);
      }
    }
  }

  void verify_every_word() {
    write(1);
    peer_.exchange();
    check(1);
    peer_.release();
  }

  // Seconds a call, of so many back to back; the release of the last one is not in the time.
  double timed(std::size_t length) {
    const std::size_t from_first_to_last = std::max<std::size_t>(words() - 1, 1);
    write(from_first_to_last);
    barrier_();
    const double start = now();
    for (std::size_t i = 1; i < length; ++i) {
      peer_.exchange();
      peer_.release();
    }
    peer_.exchange();
    const double elapsed = now() - start;
    check(from_first_to_last);
    peer_.release();
    return elapsed / static_cast<double>(length);
  }

  // All ranks must take the same number of calls, so rank 0 decides from its own warm-up.
  double agreed_estimate(double mine) {
    if (rank_ == 0) shared_.estimate = mine;
    barrier_();
    const double estimate = shared_.estimate;
    barrier_();
    return estimate;
  }

  double single_calls() {
    const double start = now();
    for (int i = 0; i < 5; ++i) timed(1);
    return sampled(agreed_estimate((now() - start) / 5), 1, 7, kMaxSamples);
  }

  double trains() {
    const double estimate = agreed_estimate(timed(5));
    return sampled(estimate, bounded(options_.seconds / 5 / estimate, 5, 1000), 3, 25);
  }

  double one_train() {
    shared_.seconds[rank_][0] = timed(options_.repetitions);
    return median_of_slowest(1);
  }

  // Takes samples of `length` calls until the time is over; fewer when other load on the machine
  // makes them slower than estimated.
  double sampled(double estimate, std::size_t length, std::size_t least, std::size_t most) {
    const double wanted = options_.seconds / (static_cast<double>(length) * estimate);
    if (rank_ == 0) shared_.stop_at = bounded(wanted, least, most);
    barrier_();
    const double end = now() + 2 * options_.seconds;
    std::size_t i = 0;
    for (; i < shared_.stop_at; ++i) {
      // Seen by all ranks before they ask for i + 1: there is a barrier in every sample.
      if (rank_ == 0 && i + 1 >= least && now() > end) shared_.stop_at = i + 1;
      shared_.seconds[rank_][i] = timed(length);
    }
    return median_of_slowest(i);
  }

  double median_of_slowest(std::size_t samples) {
    barrier_();
    std::vector<double> slowest(samples, 0.0);
    for (int rank = 0; rank < options_.ranks; ++rank)
      for (std::size_t i = 0; i < samples; ++i)
        slowest[i] = std::max(slowest[i], shared_.seconds[rank][i]);
    barrier_();
    std::sort(slowest.begin(), slowest.end());
    return slowest[samples / 2];
  }

  static std::size_t bounded(double value, double low, double high) {
    return static_cast<std::size_t>(std::clamp(value, low, high));
  }

  std::size_t words() const { return options_.bytes / 8; }

  Peer& peer_;
  Barrier& barrier_;
  Shared& shared_;
  const int rank_;
  const Options options_;
  std::vector<int> others_;
  std::uint64_t round_ = 0;
};

// What a program does whose ranks have no launcher: `make(barrier, rank)` is a rank's peer.
template <class MakePeer>
int measure_forked(const Options& options, MakePeer make) {
  auto* shared = static_cast<Shared*>(shared_memory(sizeof(Shared)));
  return launch(options.ranks, [&](int rank) {
    Barrier barrier(*shared, rank, options.ranks);
    auto peer = make(barrier, rank);
    Measurement(peer, barrier, *shared, rank, options).run();
  });
}

}  // namespace bench
