// The measuring shape that every native all-to-all program shares: options, stamps that prove the
// transfer, timing of single calls and of trains, one JSON line at the end.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
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
  Options options;
  bool known = true;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    const double value = std::atof(argv[i + 1]);
    if (name == "--ranks")
      options.ranks = static_cast<int>(value);
    else if (name == "--bytes")
      options.bytes = static_cast<std::size_t>(value);
    else if (name == "--seconds")
      options.seconds = value;
    else if (name == "--repetitions")
      options.repetitions = static_cast<std::size_t>(value);
    else
      known = false;
  }
  if (!known || options.ranks < 2 || options.ranks > kMaxRanks || options.bytes == 0 ||
      options.bytes % 8 != 0) {
    std::fprintf(stderr, "options: --ranks (2 to %d) --bytes (a multiple of 8)", kMaxRanks);
    std::fprintf(stderr, " [--seconds X | --repetitions N]\n");
    std::exit(2);
  }
  return options;
}

inline double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

/// Peer: exchange() returns when all data can be read, view(source) is that data, release() gives
/// it back, outgoing(destination) is what the next exchange sends.
template <class Peer>
class Measurement {
 public:
  Measurement(Peer& peer, Rank& self, const Options& options)
      : peer_(peer), self_(self), options_(options) {
    for (int other = 0; other < self.count; ++other)
      if (other != self.index) others_.push_back(other);
  }

  // Prints microseconds a call: the slowest rank's, median of the samples.
  void run() {
    for (int round = 0; round < 3; ++round) timed(1, true);
    double single = 0;
    double train = 0;
    if (options_.repetitions > 0) {
      train = sampled(options_.repetitions, 1, 1);
    } else {
      const double start = now();
      for (int i = 0; i < 5; ++i) timed(1);
      single = sampled_for((now() - start) / 5, 1, 7, kMaxSamples);
      train = sampled_for(timed(5), 1000, 3, 25);
    }
    timed(1, true);
    self_.meet();
    if (self_.index != 0) return;
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
        const std::uint64_t word = stamp_of(self_.index, to) + i;
        std::memcpy(peer_.outgoing(to) + 8 * i, &word, 8);
      }
    }
  }

  void check(std::size_t step) const {
    for (const int from : others_) {
      for (std::size_t i = 0; i < words(); i += step) {
        std::uint64_t found;
        std::memcpy(&found, peer_.view(from) + 8 * i, 8);
        if (found == stamp_of(from, self_.index) + i) continue;
        std::fprintf(stderr, "rank %d: word %zu from rank %d is wrong\n", self_.index, i, from);
        std::_Exit(3);
      }
    }
  }

  // Seconds a call, of so many back to back; the release of the last one is not in the time. Its
  // messages are checked: their first and last words, or all.
  double timed(std::size_t length, bool every_word = false) {
    const std::size_t step = every_word ? 1 : std::max<std::size_t>(words() - 1, 1);
    write(step);
    self_.meet();
    const double start = now();
    for (std::size_t i = 1; i < length; ++i) {
      peer_.exchange();
      peer_.release();
    }
    peer_.exchange();
    const double elapsed = now() - start;
    check(step);
    peer_.release();
    return elapsed / static_cast<double>(length);
  }

  // Samples for the wanted seconds, of calls that take an estimated time: so many calls at most in
  // a sample, and so many samples.
  double sampled_for(double estimate, double longest, double least, double most) {
    const double length =
        std::clamp(options_.seconds / 5 / estimate, std::min(5.0, longest), longest);
    return sampled(length, std::clamp(options_.seconds / (length * estimate), least, most), least);
  }

  // Median of the slowest rank's seconds a call. All ranks must take the same number of calls, so
  // rank 0 decides; fewer samples when other load on the machine makes them slower than estimated.
  double sampled(double length, double samples, double least) {
    if (self_.index == 0) {
      self_.shared.length = static_cast<std::size_t>(length);
      self_.shared.stop_at = static_cast<std::size_t>(samples);
    }
    self_.meet();
    const double end = now() + 2 * options_.seconds;
    std::size_t i = 0;
    for (; i < self_.shared.stop_at; ++i) {
      // Seen by all ranks before they ask for i + 1: there is a barrier in every sample.
      if (self_.index == 0 && i + 1 >= least && now() > end) self_.shared.stop_at = i + 1;
      self_.shared.seconds[self_.index][i] = timed(self_.shared.length);
    }
    self_.meet();
    std::vector<double> slowest(i, 0.0);
    for (int rank = 0; rank < self_.count; ++rank)
      for (std::size_t at = 0; at < i; ++at)
        slowest[at] = std::max(slowest[at], self_.shared.seconds[rank][at]);
    self_.meet();
    std::sort(slowest.begin(), slowest.end());
    return slowest[i / 2];
  }

  std::size_t words() const { return options_.bytes / 8; }

  Peer& peer_;
  Rank& self_;
  const Options options_;
  std::vector<int> others_;
  std::uint64_t round_ = 0;
};

// What a program does whose ranks have no launcher: `make(rank)` is a rank's peer.
template <class MakePeer>
int measure_forked(const Options& options, MakePeer make) {
  auto* shared = static_cast<Shared*>(shared_memory(sizeof(Shared)));
  return launch(options.ranks, [&](int index) {
    Rank rank{*shared, index, options.ranks};
    auto peer = make(rank);
    Measurement(peer, rank, options).run();
  });
}

}  // namespace bench
