// bls::Channel with bound 0 from C++: post, wait, read in place, release.
#include <memory>
#include <span>

#include "channel/channel.h"
#include "measurement.h"
#include "transport/shm/shm_transport.h"

namespace {

constexpr std::uint32_t kSlots = 2;  // 2 (bound + 1)
constexpr std::size_t kHeaderRoom = 256;

class ChannelPeer {
 public:
  /// `addresses` is where the ranks tell each other their segments; a store over TCP does it in the
  /// Python package.
  ChannelPeer(bls::SegmentAddress* addresses, bench::Rank& self, std::size_t bytes)
      : bytes_(bytes),
        send_(bytes * static_cast<std::size_t>(self.count)),
        blocks_(self.count),
        parts_(self.count),
        messages_(self.count) {
    const bls::RingShape shape{self.index, self.count, kSlots, bytes + kHeaderRoom};
    auto transport = std::make_unique<bls::ShmTransport>(shape);
    addresses[self.index] = transport->address();
    self.meet();
    transport->connect(std::span(addresses, static_cast<std::size_t>(self.count)));
    self.meet();
    transport->seal();
    bls::ChannelConfig config;
    config.rank = self.index;
    config.world_size = self.count;
    config.slots = kSlots;
    config.local_ranks = self.count;
    channel_ = std::make_unique<bls::Channel>(std::move(transport), config);
    for (int to = 0; to < self.count; ++to) {
      const auto index = static_cast<std::size_t>(to);
      blocks_[index] = {outgoing(to), bytes};
      parts_[index] = bls::Part(&blocks_[index], 1);
      // A rank's own block needs no transfer; no program here moves it.
      messages_[index] = to == self.index ? bls::Message() : bls::Message(&parts_[index], 1);
    }
  }

  /// An exchange that was pulled would not have measured the slots.
  ~ChannelPeer() {
    if (channel_->pulled_messages() == 0) return;
    std::fprintf(stderr, "messages did not fit into their slots\n");
    std::_Exit(3);
  }

  std::byte* outgoing(int to) { return send_.data() + static_cast<std::size_t>(to) * bytes_; }

  void exchange() {
    channel_->post(messages_);
    arrival_ = &channel_->wait();
  }

  const std::byte* view(int from) const { return arrival_->part(from, 0).data; }

  void release() { channel_->release(); }

 private:
  std::size_t bytes_;
  std::vector<std::byte> send_;
  std::vector<bls::Block> blocks_;
  std::vector<bls::Part> parts_;
  std::vector<bls::Message> messages_;
  std::unique_ptr<bls::Channel> channel_;
  const bls::Arrival* arrival_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const bench::Options options = bench::parse_options(argc, argv);
  auto* addresses = static_cast<bls::SegmentAddress*>(
      bench::shared_memory(bench::kMaxRanks * sizeof(bls::SegmentAddress)));
  return bench::measure_forked(
      options, [&](bench::Rank& rank) { return ChannelPeer(addresses, rank, options.bytes); });
}
