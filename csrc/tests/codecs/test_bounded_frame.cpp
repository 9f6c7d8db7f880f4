#include <doctest/doctest.h>

#include <limits>
#include <string>
#include <vector>

#include "errors.h"
#include "tests/support/encoded.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr uint32_t kGroupOfRow[] = {0, 0, 1};

/// The frame that docs/wire-format.md shows.
Bytes golden_bounded_frame() {
  constexpr float kEscaped = std::numeric_limits<float>::infinity();
  const float first[] = {0, 0.3f, 1, -1.2f, 0,        0.1f, 0.2f, 0,  // new
                         0, 0.1f, 0, 0,     0,        0,    0,    0,  // zero
                         0, 0.4f, 1, -1.1f, 0,        0.2f, 0,    0,  // equal to the first one
                         1, 1,    1, 1,     kEscaped, 1,    1,    1,  // escaped
                         2, 0,    0, 0.5f,  0,        0,    0,    -1};
  const float second[] = {7, 7, -7};
  const float third[] = {1, 2};
  const FrameTable<const float> tables[] = {
      {Codec::kErrorBounded, {first, 5, 8, 8}, 0.25f},
      {Codec::kErrorBounded, {second, 3, 1, 1}, 0.01f, {kGroupOfRow, 2}},
      {Codec::kBfloat16, {third, 1, 2, 2}}};
  return frame_of(tables);
}

struct Plan {
  float bound = 0.25f;
  RowGroups groups{kGroupOfRow, 2};
  Codec third = Codec::kBfloat16;
};

/// Decodes the golden frame by a plan; returns the text of the error, or "".
std::string told(const Bytes& bytes, const Plan& plan = {}) {
  std::vector<float> first(40), second(3), third(2);
  const FrameTable<float> tables[] = {
      {Codec::kErrorBounded, {first.data(), 5, 8, 8}, plan.bound},
      {Codec::kErrorBounded, {second.data(), 3, 1, 1}, 0.01f, plan.groups},
      {plan.third, {third.data(), 1, 2, 2}}};
  try {
    decode_frame(bytes, tables);
  } catch (const ChannelError& error) {
    CHECK(error.kind() == ErrorKind::kProtocol);
    return error.what();
  }
  CHECK(second[0] == second[1]);
  return "";
}

}  // namespace

TEST_SUITE_BEGIN("bounded");

TEST_CASE("golden bytes of a frame with bounds") {
  on_each_instruction_set([] {
    CHECK(hex(golden_bounded_frame()) ==
          "cfb10300 68621140 08000000 00000000 03000000 e51f25f6 45d85566 06060200 286b8014 "
          "5dc0f4a3 00000080 3f000080 3f000080 3f000080 3f000080 7f000080 3f000080 3f000080 "
          "3f1222fe 5e78a080 3f0040");
    CHECK(told(golden_bounded_frame()) == "");
  });
}

TEST_CASE("a frame with bounds is refused with any byte damaged, missing or too many") {
  const Bytes golden = golden_bounded_frame();
  for (size_t at = 0; at < golden.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      Bytes damaged = golden;
      damaged[at] ^= static_cast<std::byte>(1 << bit);
      CHECK(told(damaged) != "");
    }
    CHECK(told({golden.begin(), golden.begin() + static_cast<ptrdiff_t>(at)}) != "");
  }
  Bytes longer = golden;
  longer.resize(golden.size() + 1);
  CHECK(told(changed(longer, 3, 0)).find("behind its last table") != std::string::npos);
}

TEST_CASE("each field of a frame with bounds that contradicts the plan is named") {
  const Bytes golden = golden_bounded_frame();
  CHECK(told(changed(golden, 2, 2)).find("version 2, expected 3") != std::string::npos);
  CHECK(told(changed(golden, 8, 9)).find("rows 9, expected 8") != std::string::npos);
  CHECK(told(changed(golden, 24, 0)).find("other error bounds") != std::string::npos);
  CHECK(told(changed(golden, 28, 3)).find("codec 3, expected 6") != std::string::npos);
  CHECK(told(changed(golden, 31, 9)).find("unknown form") != std::string::npos);
  CHECK(told(golden, {.bound = 0.125f}).find("other error bounds") != std::string::npos);
  CHECK(told(golden, {.groups = {}}).find("other groups of equal rows") != std::string::npos);
  CHECK(told(golden, {.third = Codec::kFloat16}).find("codec 2, expected 1") != std::string::npos);
}

TEST_CASE("a frame of no error-bounded table has no checksum of bounds") {
  const float values[] = {1, 2};
  const FrameTable<const float> tables[] = {{Codec::kFloat32, {values, 1, 2, 2}, 0.5f}};
  const Bytes frame = frame_of(tables);
  for (size_t at = 24; at < 28; ++at) CHECK(frame[at] == std::byte{0});
  CHECK(least_frame_bytes(tables) == frame.size());
}

TEST_SUITE_END();
