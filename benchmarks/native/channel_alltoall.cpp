// bls::Channel with bound 0 from C++: post, wait, read in place, release.
#include <array>
#include <memory>
#include <span>

#include "channel/channel.h"
#include "measurement.h"
#include "transport/shm/shm_transport.h"

namespace {

constexpr std::uint32_t kSlots = 2;  // 2 (bound + 1)
constexpr std::size_t kHeaderRoom = 256;

/// Where the ranks tell each other their segments; a store over TCP does it in the Python package.
struct Addresses {
  bls::SegmentAddress of[bench::kMaxRanks];
};

class ChannelPeer {
 public:
  ChannelPeer(Addresses& addresses, int rank, const bench::Options& options,
              bench::Barrier& barrier)
      : stride_((options.bytes + 63) / 64 * 64),
        send_(stride_ * static_cast<std::size_t>(options.ranks)) {
    const bls::RingShape shape{rank, options.ranks, kSlots, options.bytes + kHeaderRoom};
    auto transport = std::make_unique<bls::ShmTransport>(shape);
    addresses.of[rank] = transport->address();
    barrier();
    transport->connect(std::span(addresses.of, static_cast<std::size_t>(options.ranks)));
    barrier();
    transport->seal();
    bls::ChannelConfig config;
    config.rank = rank;
    config.world_size = options.ranks;
    config.slots = kSlots;
    config.local_ranks = options.ranks;
    channel_ = std::make_unique<bls::Channel>(std::move(transport), config);
    for (int to = 0; to < options.ranks; ++to) {
      const auto index = static_cast<std::size_t>(to);
      blocks_[index] = {outgoing(to), options.bytes};
      parts_[index] = bls::Part(&blocks_[index], 1);
      // A rank's own block needs no transfer; no program here moves it.
      messages_[index] = to == rank ? bls::Message() : bls::Message(&parts_[index], 1);
    }
    posted_ = std::span(messages_.data(), static_cast<std::size_t>(options.ranks));
  }

  /// An exchange that was pulled would not have measured the slots.
  ~ChannelPeer() {
    if (channel_->pulled_messages() == 0) return;
    std::fprintf(stderr, "messages did not fit into their slots\n");
    std::_Exit(3);
  }

  std::byte* outgoing(int to) { return send_.data() + static_cast<std::size_t>(to) * stride_; }

  void exchange() {
    channel_->post(posted_);
    arrival_ = &channel_->wait();
  }

  const std::byte* view(int from) const { return arrival_->part(from, 0).data; }

  void release() { channel_->release(); }

 private:
  std::size_t stride_;
  std::vector<std::byte> send_;
  std::array<bls::Block, bench::kMaxRanks> blocks_;
  std::array<bls::Part, bench::kMaxRanks> parts_;
  std::array<bls::Message, bench::kMaxRanks> messages_;
  std::span<const bls::Message> posted_;
  std::unique_ptr<bls::Channel> channel_;
  const bls::Arrival* arrival_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const bench::Options options = bench::parse_options(argc, argv);
  auto* addresses = static_cast<Addresses*>(bench::shared_memory(sizeof(Addresses)));
  return bench::measure_forked(options, [&](bench::Barrier& barrier, int rank) {
    return ChannelPeer(*addresses, rank, options, barrier);
  });
}
