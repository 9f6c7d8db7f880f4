// The honest limit on one host: memcpy into the peer's slot, one flag, read in place. No headers,
// no credits, no checks, so it is not a usable channel.
#include <cstring>

#include "measurement.h"

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;

class RawPeer {
 public:
  RawPeer(std::byte* slots, const bench::Rank& self, std::size_t bytes)
      : slots_(slots),
        rank_(self.index),
        ranks_(self.count),
        bytes_(bytes),
        outgoing_(bytes * static_cast<std::size_t>(ranks_)) {}

  static std::size_t slot_bytes(std::size_t bytes) {
    return (bytes + kLine + kPage - 1) / kPage * kPage;
  }

  std::byte* outgoing(int to) { return outgoing_.data() + static_cast<std::size_t>(to) * bytes_; }

  void exchange() {
    ++sequence_;
    for (int step = 1; step < ranks_; ++step) {
      const int to = (rank_ + step) % ranks_;
      std::byte* slot = slot_of(rank_, to);
      std::memcpy(slot + kLine, outgoing(to), bytes_);
      flag_in(slot).store(sequence_, std::memory_order_release);
    }
    for (int step = 1; step < ranks_; ++step) {
      const auto& flag = flag_in(slot_of((rank_ + step) % ranks_, rank_));
      bench::wait_until([&] { return flag.load(std::memory_order_acquire) == sequence_; });
    }
  }

  const std::byte* view(int from) const { return slot_of(from, rank_) + kLine; }

  // Two slots a pair suffice: a peer's next message but one can't start before this rank has sent
  // its next one, which it does after reading.
  void release() {}

 private:
  std::byte* slot_of(int from, int to) const {
    const auto pair = static_cast<std::size_t>(from * ranks_ + to);
    return slots_ + (2 * pair + sequence_ % 2) * slot_bytes(bytes_);
  }

  static std::atomic<std::uint64_t>& flag_in(std::byte* slot) {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(slot);
  }

  std::byte* slots_;
  int rank_;
  int ranks_;
  std::size_t bytes_;
  std::vector<std::byte> outgoing_;
  std::uint64_t sequence_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const bench::Options options = bench::parse_options(argc, argv);
  const auto pairs = static_cast<std::size_t>(options.ranks * options.ranks);
  auto* slots =
      static_cast<std::byte*>(bench::shared_memory(2 * pairs * RawPeer::slot_bytes(options.bytes)));
  return bench::measure_forked(
      options, [&](bench::Rank& rank) { return RawPeer(slots, rank, options.bytes); });
}
