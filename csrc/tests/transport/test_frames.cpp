// Frames as they travel over a connection: taken apart whatever pieces the network makes of them.

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "errors.h"
#include "tests/support/ranks.h"
#include "transport/tcp/frames.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// Notes all frames, and refuses what is larger than it has room for.
class NotingSink final : public FrameSink {
 public:
  std::byte* place(const FrameHead& head) override {
    if (head.bytes > sizeof(memory_)) throw ChannelError(ErrorKind::kProtocol, "too large");
    return memory_;
  }
  void complete(const FrameHead& head) override {
    const std::string payload(reinterpret_cast<const char*>(memory_), head.bytes);
    notes.push_back(std::to_string(static_cast<uint32_t>(head.kind)) + " " +
                    std::to_string(head.number) + " " + std::to_string(head.whole) + " " + payload);
  }

  std::vector<std::string> notes;

 private:
  std::byte memory_[1 << 20];
};

std::string all_of(FrameWriter& writer) {
  std::string stream;
  while (!writer.idle()) {
    const auto pieces = writer.pieces();
    for (const iovec& piece : pieces) {
      stream.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
    }
    writer.sent(pieces[0].iov_len + pieces[1].iov_len);
  }
  return stream;
}

const std::byte* bytes_of(const std::string& text) {
  return reinterpret_cast<const std::byte*>(text.data());
}

/// Gives the reader so many bytes, as a socket would. Returns how many it took.
size_t feed(FrameReader& reader, const std::string& stream, size_t at, size_t most) {
  const auto room = reader.room();
  size_t given = 0;
  for (const iovec& piece : room) {
    const size_t part = std::min({piece.iov_len, most - given, stream.size() - at - given});
    if (part != 0) std::memcpy(piece.iov_base, stream.data() + at + given, part);
    given += part;
  }
  reader.take(given);
  return given;
}

}  // namespace

TEST_CASE("what was written is read, in pieces of any size") {
  std::mt19937 random(7);
  const std::string small = "a message", large(700'000, 'x');
  FrameWriter writer;
  writer.message(5, bytes_of(small), small.size());
  writer.large(5, bytes_of(large), large.size());
  writer.message(6, nullptr, 0);
  writer.credit(3);
  writer.credit(4);
  writer.end(9);
  writer.poison({2, "it failed"});
  writer.closed(7);
  const std::string stream = all_of(writer);
  CHECK(all_of(writer).empty());

  for (const size_t most : {size_t{1}, size_t{23}, size_t{100}, size_t{1} << 16, size_t{1} << 21}) {
    NotingSink sink;
    FrameReader reader(sink);
    for (size_t at = 0; at < stream.size();) {
      at += feed(reader, stream, at, 1 + random() % most);
    }
    REQUIRE(sink.notes.size() == 9);
    // Of a count the last value, and all of it before what waits.
    CHECK(sink.notes[0] == "5 2 0 it failed");
    CHECK(sink.notes[1] == "4 9 0 ");
    CHECK(sink.notes[2] == "3 4 0 ");
    CHECK(sink.notes[3] == "6 7 0 ");
    CHECK(sink.notes[4] == "1 5 0 a message");
    CHECK(sink.notes[5] == "2 5 700000 " + std::string(256 << 10, 'x'));
    CHECK(sink.notes[7] == "2 5 700000 " + std::string(700'000 - (512 << 10), 'x'));
    CHECK(sink.notes[8] == "1 6 0 ");
  }
}

TEST_CASE("poison leaves between the pieces of a large message") {
  const std::string large(1 << 20, 'x');
  FrameWriter writer;
  writer.large(0, bytes_of(large), large.size());
  const auto first = writer.pieces();
  writer.sent(100);
  writer.poison({1, "now"});
  writer.sent(first[0].iov_len + first[1].iov_len - 100);
  const auto second = writer.pieces();
  FrameHead head;
  std::memcpy(&head, second[0].iov_base, sizeof(head));
  CHECK(head.kind == FrameKind::kPoison);
}

TEST_CASE("a frame that is refused ends the reading") {
  NotingSink sink;
  FrameReader reader(sink);
  const FrameHead head{FrameKind::kMessage, 1 << 21, 0, 0};
  const auto room = reader.room();
  std::memcpy(room[1].iov_base, &head, sizeof(head));
  const auto failure = failure_of([&] { reader.take(sizeof(head)); });
  REQUIRE(failure);
  CHECK(failure->kind == ErrorKind::kProtocol);
  CHECK(sink.notes.empty());
}
