#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codecs/checksum.h"
#include "codecs/frame.h"
#include "codecs/rowwise.h"
#include "errors.h"
#include "tests/support/encoded.h"

using namespace bls;
using namespace bls::testing;

namespace {

using Floats = std::vector<float>;

constexpr Codec kAll[] = {Codec::kFloat32, Codec::kFloat16, Codec::kBfloat16,
                          Codec::kUint8,   Codec::kUint4,   Codec::kUint2};

Floats random_rows(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

/// Encoded in memory of just the size that was announced.
Bytes encoded(Codec codec, const Matrix<const float>& rows) {
  Bytes out(encode(codec, rows, {}));
  CHECK(encode(codec, rows, out) == out.size());
  return out;
}

Bytes golden_frame() {
  const float first[] = {0, 1, 2, 3, -1, -1, -1, -1};
  const float second[] = {1, std::numeric_limits<float>::infinity(), 0.5};
  const FrameTable<const float> tables[] = {{Codec::kUint2, {first, 2, 4, 4}},
                                            {Codec::kUint8, {second, 3, 1, 1}}};
  return frame_of(tables);
}

/// Decodes into the shapes of the golden frame; returns the text of the error, or "".
std::string decode_golden(const Bytes& bytes, Codec second_codec = Codec::kUint8) {
  Floats first(8), second(3);
  const FrameTable<float> tables[] = {{Codec::kUint2, {first.data(), 2, 4, 4}},
                                      {second_codec, {second.data(), 3, 1, 1}}};
  try {
    decode_frame(bytes, tables);
  } catch (const ChannelError& error) {
    CHECK(error.kind() == ErrorKind::kProtocol);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_SUITE_BEGIN("codecs");

TEST_CASE("any shape comes back, within the bytes that are promised and no others") {
  on_each_instruction_set([] {
    for (const size_t columns : {1, 3, 8, 15, 16, 17, 31, 32, 48, 63, 64, 65, 100, 129}) {
      Floats values = random_rows(5 * (columns + 3), static_cast<unsigned>(columns));
      // Bits of what follows each row, the last one's apart, are next to those that are read.
      values.resize(values.size() - 3);
      values[columns + 3] = std::numeric_limits<float>::quiet_NaN();
      const Matrix<const float> rows{values.data(), 5, columns, columns + 3};
      for (const Codec codec : kAll) {
        CAPTURE(static_cast<int>(codec));
        const Bytes bytes = encoded(codec, rows);
        Floats back(values.size(), 7.0f);
        decode(codec, bytes, {back.data(), 5, columns, columns + 3});
        for (size_t row = 0; row < 5; ++row) {
          for (size_t i = 0; i < columns; ++i) {
            const float value = rows.row(row)[i], result = back[row * (columns + 3) + i];
            if (row == 1 && i == 0) {
              CHECK(std::isnan(result));
            } else {
              CHECK(std::abs(value - result) < (codec == Codec::kUint2   ? 1.5f
                                                : codec == Codec::kUint4 ? 0.3f
                                                                         : 0.03f));
            }
          }
          for (size_t i = columns; i < columns + 3 && row < 4; ++i) {
            CHECK(back[row * (columns + 3) + i] == 7.0f);
          }
        }
      }
    }
  });
}

TEST_CASE("the size is told, and nothing written beyond, where memory is too short") {
  on_each_instruction_set([] {
    Floats values = random_rows(4 * 33, 5);
    values[33] = std::numeric_limits<float>::infinity();
    values[2 * 33 + 32] = std::numeric_limits<float>::quiet_NaN();
    const Matrix<const float> rows{values.data(), 4, 33, 33};
    for (const Codec codec : kAll) {
      CAPTURE(static_cast<int>(codec));
      const size_t bytes = encoded(codec, rows).size();
      CHECK(bytes >= usual_bytes(codec, 4, 33));
      CHECK(bytes <= max_bytes(codec, 4, 33));
      const FrameTable<const float> tables[] = {{codec, rows}, {codec, rows}};
      const size_t frame = encode_frame(tables, {});
      CHECK(frame == kFrameHeaderBytes + 2 * (kFrameTableBytes + bytes));
      for (size_t room = 0; room < frame; room += room < bytes ? 1 : 7) {
        Bytes memory(frame, std::byte{0xa5});
        const std::span<std::byte> out = std::span(memory).first(room);
        if (room < bytes) CHECK(encode(codec, rows, out) == bytes);
        CHECK(encode_frame(tables, out) == frame);
        CHECK(std::count(memory.begin() + static_cast<ptrdiff_t>(room), memory.end(),
                         std::byte{0xa5}) == static_cast<ptrdiff_t>(frame - room));
      }
    }
  });
}

TEST_CASE("all instruction sets write the same bytes") {
  const Floats values = random_rows(7 * 83, 1);
  for (const Codec codec : kAll) {
    use_instruction_set("portable");
    const Bytes expected = encoded(codec, {values.data(), 7, 83, 83});
    on_each_instruction_set([&] { CHECK(encoded(codec, {values.data(), 7, 83, 83}) == expected); });
  }
}

TEST_CASE("the checksum is CRC-32C") {
  on_each_instruction_set([] {
    const std::string digits = "123456789";
    CHECK(crc32c(std::as_bytes(std::span(digits))) == 0xe3069283);
    CHECK(crc32c(Bytes(32)) == 0x8a9136aa);  // RFC 3720, B.4
    CHECK(crc32c(Bytes(32, std::byte{0xff})) == 0x62a8ab43);
    CHECK(crc32c({}) == 0);
  });
}

TEST_CASE("golden bytes of a frame") {
  on_each_instruction_set([] {
    CHECK(hex(golden_frame()) ==
          "cfb10300 7978ed2c 05000000 00000000 02000000 00000000 00000000 05030000 "
          "803f0000 0000e400 00000000 0080bf00 00000000 0000803f 000000c0 7f000000 "
          "00000000 00000000 003f0000 00807f");
    CHECK(decode_golden(golden_frame()) == "");
  });
}

TEST_CASE("a frame with any byte damaged is refused") {
  const Bytes golden = golden_frame();
  for (size_t at = 0; at < golden.size(); ++at) {
    Bytes damaged = golden;
    damaged[at] ^= std::byte{0x10};
    CHECK(decode_golden(damaged) != "");
  }
}

TEST_CASE("a frame that is cut short or too long is refused") {
  const Bytes golden = golden_frame();
  for (size_t bytes = 0; bytes < golden.size(); ++bytes) {
    const Bytes cut(golden.begin(), golden.begin() + static_cast<ptrdiff_t>(bytes));
    CHECK(decode_golden(cut) != "");
  }
  Bytes longer = golden;
  longer.resize(golden.size() + 1);
  CHECK(decode_golden(longer) != "");
  CHECK(decode_golden(changed(longer, 3, 0)).find("behind its last table") != std::string::npos);
}

TEST_CASE("each field of a frame that contradicts the plan is named") {
  const Bytes golden = golden_frame();
  const auto told = [&](size_t at, uint8_t value) {
    return decode_golden(changed(golden, at, value));
  };
  CHECK(told(0, 0).find("magic number") != std::string::npos);
  CHECK(told(2, 9).find("version 9, expected 3") != std::string::npos);
  CHECK(told(3, 1).find("flags 1, expected 0") != std::string::npos);
  CHECK(told(8, 9).find("rows 9, expected 5") != std::string::npos);
  CHECK(told(16, 3).find("tables 3, expected 2") != std::string::npos);
  CHECK(told(24, 1).find("other error bounds") != std::string::npos);
  CHECK(told(28, 4).find("codec 4, expected 5") != std::string::npos);
  CHECK(told(29, 4).find("codec 4, expected 3") != std::string::npos);
  CHECK(decode_golden(golden, Codec::kUint4).find("codec 3, expected 4") != std::string::npos);
}

TEST_CASE("what an encoder's caller gets wrong") {
  CHECK_THROWS_AS(rowwise::max_bytes(3, 1, 1), std::invalid_argument);
  CHECK_THROWS_AS(use_instruction_set("none"), std::invalid_argument);
}

TEST_SUITE_END();
