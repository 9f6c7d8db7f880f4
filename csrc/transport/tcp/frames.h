#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "transport/transport.h"

namespace bls {

enum class FrameKind : uint32_t {
  kMessage = 1,  ///< a message in a slot, without its arrival word
  kLarge,        ///< the next bytes of what a message has outside of its slot
  kCredit,
  kEnd,
  kPoison,
  kClosed,
};

/// What stands before everything that travels over a connection (docs/wire-format.md).
struct FrameHead {
  FrameKind kind;
  uint32_t bytes;   ///< behind the head
  uint64_t number;  ///< of a message; or the count that is told; or the rank that failed first
  uint64_t whole;   ///< kLarge: bytes of all its frames together
};
static_assert(sizeof(FrameHead) == 24);

/// Bytes of a text of poison that travel.
inline constexpr size_t kMostPoison = 1024;

/// What becomes of frames that come.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  /// Where the bytes of a frame belong. Throws ChannelError (kProtocol) if it can't be right.
  virtual std::byte* place(const FrameHead& head) = 0;
  /// All bytes of a frame are there.
  virtual void complete(const FrameHead& head) = 0;
};

/// Takes a stream of bytes apart into frames. Bytes of messages go to their place at once, as far
/// as they did not come together with a head.
class FrameReader {
 public:
  explicit FrameReader(FrameSink& sink);

  /// Where the next bytes of the stream belong: the second piece is for those behind the first.
  std::array<iovec, 2> room();
  /// So many have come there. Throws what the sink throws.
  void take(size_t bytes);
  /// Whether a frame of `number` has begun to come and is not whole.
  bool is_within(uint64_t number) const { return within_ && head_.number == number; }

 private:
  static constexpr size_t kStaged = size_t{64} << 10;

  void finish();

  FrameSink& sink_;
  std::unique_ptr<std::byte[]> staged_;
  size_t staged_bytes_ = 0;  // of a head that is not whole
  bool within_ = false;      // a frame
  FrameHead head_{};
  std::byte* at_ = nullptr;
  size_t left_ = 0;
};

/// Puts what a rank tells a peer into frames, and keeps it until it has left.
///
/// Counts and poison go before messages that wait: of a count only the last value leaves. What is
/// large goes in pieces, so that they do not wait for all of it.
class FrameWriter {
 public:
  /// `payload` stays in place until the peer has read the message.
  void message(uint64_t sequence, const std::byte* payload, size_t bytes);
  void large(uint64_t sequence, const std::byte* payload, size_t bytes);
  void credit(uint64_t count) { credit_ = count; }
  void end(uint64_t count) { end_ = count; }
  void poison(const Poison& poison);
  /// Nothing but what waits leaves any more.
  void closed(uint64_t posted) { closed_ = posted; }
  /// Drops what waits.
  void clear();

  /// The next bytes to leave, none if nothing waits.
  std::array<iovec, 2> pieces();
  void sent(size_t bytes);
  bool idle() const;

 private:
  /// What is cut off from a large message: some ms of a link of 1 Gbit/s.
  static constexpr size_t kPiece = size_t{256} << 10;

  struct Waiting {
    FrameKind kind;
    uint64_t sequence;
    const std::byte* payload;
    size_t bytes;
    size_t cut = 0;  // of these, put into frames
  };
  void begin(FrameKind kind, uint64_t number, const std::byte* payload, size_t bytes,
             uint64_t whole = 0);
  bool begin_next();

  std::deque<Waiting> waiting_;
  std::optional<uint64_t> credit_;
  std::optional<uint64_t> end_;
  std::optional<uint64_t> closed_;
  std::optional<Poison> poison_;
  // The frame that is leaving.
  FrameHead head_{};
  size_t head_left_ = 0;
  std::string text_;
  const std::byte* payload_ = nullptr;
  size_t payload_left_ = 0;
};

}  // namespace bls
