// The measuring shape that every native all-to-all program shares: stamps that prove the transfer,
// one-shot and train timing, one JSON line at the end.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "barrier.h"

namespace bench {

inline constexpr int kTrainLength = 1000;
inline constexpr std::size_t kMinOneShots = 7;
inline constexpr std::size_t kMinTrains = 3;

struct Summary {
  std::size_t samples = 0;
  std::size_t length = 1;  // calls in one sample
  double q1 = 0, median = 0, q3 = 0;
};

/// Peer: exchange() returns when all data can be read, view(source) is that data, release() gives
/// it back, outgoing(destination) is what the next exchange sends.
template <class Peer>
class Measurement {
 public:
  Measurement(Peer& peer, Barrier& barrier, Shared& shared, int rank, const Options& options)
      : peer_(peer), barrier_(barrier), shared_(shared), rank_(rank), options_(options) {}

  void run(const char* program) {
    for (int round = 0; round < 3; ++round) verify_every_word();
    const bool one_train = options_.repetitions != 0;
    const Summary one_shot = one_train ? Summary{} : measure_one_shot();
    const Summary train = one_train ? measure_one_train() : measure_train();
    verify_every_word();
    barrier_();
    if (rank_ == 0) {
      std::printf("{\"program\": \"%s\", ", program);
      print("one_shot", one_shot);
      std::printf(", ");
      print("train", train);
      std::printf("}\n");
      std::fflush(stdout);
    }
  }

 private:
  std::uint64_t stamp_of(int source, int destination) const {
    return round_ * 1'000'003 + static_cast<std::uint64_t>(source) * 101 +
           static_cast<std::uint64_t>(destination) + 1;
  }

  std::size_t words() const { return options_.bytes / 8; }

  static void put_word(std::byte* at, std::uint64_t word) { std::memcpy(at, &word, 8); }

  void require_word(const std::byte* message, std::size_t index, std::uint64_t expected,
                    int source) const {
    std::uint64_t found;
    std::memcpy(&found, message + 8 * index, 8);
    if (found == expected) return;
    std::fprintf(stderr, "rank %d: message from rank %d, word %zu: found %llu, expected %llu\n",
                 rank_, source, index, static_cast<unsigned long long>(found),
                 static_cast<unsigned long long>(expected));
    std::_Exit(3);
  }

  void stamp() {
    ++round_;
    for (int to = 0; to < options_.ranks; ++to) {
      if (to == rank_) continue;
      put_word(peer_.outgoing(to), stamp_of(rank_, to));
      put_word(peer_.outgoing(to) + options_.bytes - 8, stamp_of(rank_, to));
    }
  }

  void check_stamps() const {
    for (int from = 0; from < options_.ranks; ++from) {
      if (from == rank_) continue;
      require_word(peer_.view(from), 0, stamp_of(from, rank_), from);
      require_word(peer_.view(from), words() - 1, stamp_of(from, rank_), from);
    }
  }

  void verify_every_word() {
    ++round_;
    for (int to = 0; to < options_.ranks; ++to) {
      if (to == rank_) continue;
      for (std::size_t i = 0; i < words(); ++i)
        put_word(peer_.outgoing(to) + 8 * i, stamp_of(rank_, to) + i);
    }
    peer_.exchange();
    for (int from = 0; from < options_.ranks; ++from) {
      if (from == rank_) continue;
      for (std::size_t i = 0; i < words(); ++i)
        require_word(peer_.view(from), i, stamp_of(from, rank_) + i, from);
    }
    peer_.release();
  }

  // Seconds a call, of so many back to back; the release of the last one is not in the time.
  double timed(std::size_t length) {
    stamp();
    barrier_();
    const double start = now();
    for (std::size_t i = 1; i < length; ++i) {
      peer_.exchange();
      peer_.release();
    }
    peer_.exchange();
    const double elapsed = now() - start;
    check_stamps();
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

  Summary measure_one_shot() {
    const double start = now();
    for (int i = 0; i < 5; ++i) timed(1);
    const double estimate = agreed_estimate((now() - start) / 5);
    const std::size_t calls = bounded(options_.seconds / estimate, kMinOneShots, kMaxSamples);
    return summarize(sample(calls, kMinOneShots, 1), 1);
  }

  Summary measure_train() {
    const double estimate = agreed_estimate(timed(5));
    const std::size_t length = bounded(options_.seconds / 5 / estimate, 5, kTrainLength);
    const double train = static_cast<double>(length) * estimate;
    const std::size_t trains = bounded(options_.seconds / train, kMinTrains, 25);
    return summarize(sample(trains, kMinTrains, length), length);
  }

  Summary measure_one_train() {
    shared_.seconds[rank_][0] = timed(options_.repetitions);
    return summarize(1, options_.repetitions);
  }

  // Takes `most` samples, or fewer when other load on the machine makes them slower than estimated.
  std::size_t sample(std::size_t most, std::size_t least, std::size_t length) {
    if (rank_ == 0) shared_.stop_at = most;
    barrier_();
    const double end = now() + 2 * options_.seconds;
    std::size_t i = 0;
    for (; i < shared_.stop_at; ++i) {
      // Seen by all ranks before they ask for i + 1: there is a barrier in every sample.
      if (rank_ == 0 && i + 1 >= least && now() > end) shared_.stop_at = i + 1;
      shared_.seconds[rank_][i] = timed(length);
    }
    return i;
  }

  static std::size_t bounded(double value, std::size_t low, std::size_t high) {
    return static_cast<std::size_t>(
        std::clamp(value, static_cast<double>(low), static_cast<double>(high)));
  }

  Summary summarize(std::size_t samples, std::size_t length) {
    barrier_();
    std::vector<double> slowest(samples, 0.0);
    for (int r = 0; r < options_.ranks; ++r)
      for (std::size_t i = 0; i < samples; ++i)
        slowest[i] = std::max(slowest[i], shared_.seconds[r][i]);
    barrier_();
    std::sort(slowest.begin(), slowest.end());
    return {samples, length, slowest[samples / 4], slowest[samples / 2], slowest[samples * 3 / 4]};
  }

  static void print(const char* name, const Summary& s) {
    std::printf(
        "\"%s\": {\"samples\": %zu, \"length\": %zu, \"q1_us\": %.4f, \"median_us\": %.4f, "
        "\"q3_us\": %.4f}",
        name, s.samples, s.length, s.q1 * 1e6, s.median * 1e6, s.q3 * 1e6);
  }

  Peer& peer_;
  Barrier& barrier_;
  Shared& shared_;
  const int rank_;
  const Options options_;
  std::uint64_t round_ = 0;
};

}  // namespace bench
