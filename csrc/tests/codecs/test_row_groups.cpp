#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "errors.h"
#include "tests/support/encoded.h"
#include "tests/support/ranks.h"

using namespace bls;
using namespace bls::testing;

namespace {

constexpr size_t kRows = 5, kColumns = 4, kStride = 6;
constexpr uint32_t kGroups[] = {0, 1, 0, 2, 1};
const RowGroups kThree{kGroups, 3};

/// Rows whose values no codec of eight bits rounds, and rows of one group equal.
std::vector<float> rows_of_groups() {
  std::vector<float> values(kRows * kStride);
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t column = 0; column < kColumns; ++column) {
      values[row * kStride + column] = static_cast<float>((kGroups[row] + 1) * 85 * (column % 4));
    }
  }
  return values;
}

template <typename T>
FrameTable<T> table_of(Codec codec, T* data, bool summed, const RowGroups& groups = kThree) {
  const float bound = codec == Codec::kErrorBounded ? 0.5f : 0;
  return {codec, {data, kRows, kColumns, kStride}, bound, groups, summed};
}

std::vector<float> through_a_frame(Codec codec, const std::vector<float>& values, bool summed) {
  const FrameTable<const float> sent[] = {table_of(codec, values.data(), summed)};
  std::vector<float> arrived(values.size(), -1);
  const FrameTable<float> received[] = {table_of(codec, arrived.data(), summed)};
  decode_frame(frame_of(sent), received);
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t column = kColumns; column < kStride; ++column) {
      CHECK(arrived[row * kStride + column] == -1);  // of other tables
      arrived[row * kStride + column] = 0;
    }
  }
  return arrived;
}

}  // namespace

TEST_CASE("one row of each group travels, by any codec") {
  const std::vector<float> values = rows_of_groups();
  for (const Codec codec : {Codec::kFloat32, Codec::kFloat16, Codec::kUint8}) {
    CHECK(through_a_frame(codec, values, false) == values);
  }
  const std::vector<float> bounded = through_a_frame(Codec::kErrorBounded, values, false);
  for (size_t i = 0; i < values.size(); ++i) CHECK(std::abs(bounded[i] - values[i]) <= 0.5f);
  const FrameTable<const float> grouped[] = {table_of(Codec::kFloat32, values.data(), false)};
  CHECK(frame_of(grouped).size() == kFrameHeaderBytes + kFrameTableBytes + 3 * kColumns * 4);
  CHECK(least_frame_bytes(grouped) == frame_of(grouped).size());
  CHECK(usual_frame_bytes(grouped) == least_frame_bytes(grouped) + 2 * kColumns * 4);
}

TEST_CASE("sums of groups arrive in their first rows, and zeros in the others") {
  std::vector<float> values(kRows * kStride);
  for (size_t i = 0; i < values.size(); ++i) {
    if (i % kStride < kColumns) values[i] = static_cast<float>(i);
  }
  for (const Codec codec : {Codec::kFloat32, Codec::kErrorBounded}) {
    const std::vector<float> sums = through_a_frame(codec, values, true);
    for (size_t column = 0; column < kColumns; ++column) {
      const auto of = [&](size_t row) { return values[row * kStride + column]; };
      const float expected[] = {of(0) + of(2), of(1) + of(4), 0, of(3), 0};
      for (size_t row = 0; row < kRows; ++row) {
        CHECK(std::abs(sums[row * kStride + column] - expected[row]) <= 0.5f);
      }
    }
  }
}

TEST_CASE("both ends must know the same groups") {
  const std::vector<float> values = rows_of_groups();
  const FrameTable<const float> sent[] = {table_of(Codec::kFloat32, values.data(), false)};
  const Bytes frame = frame_of(sent);
  const auto told = [&](const RowGroups& groups) {
    std::vector<float> arrived(values.size());
    const FrameTable<float> received[] = {table_of(Codec::kFloat32, arrived.data(), false, groups)};
    const auto failure = failure_of([&] { decode_frame(frame, received); });
    REQUIRE(failure);
    return failure->message;
  };
  constexpr uint32_t others[] = {0, 1, 2, 2, 1};
  CHECK(told({others, 3}).find("other groups of equal rows") != std::string::npos);
  CHECK(told({}).find("other groups of equal rows") != std::string::npos);
}

TEST_CASE("groups that are none are a caller's mistake") {
  const std::vector<float> values = rows_of_groups();
  constexpr uint32_t late[] = {1, 0, 0, 0, 0};
  for (const RowGroups& wrong : {RowGroups{kGroups, 2}, RowGroups{kGroups, 4}, RowGroups{late, 2},
                                 RowGroups{std::span(kGroups).first(4), 3}}) {
    for (const Codec codec : {Codec::kFloat32, Codec::kErrorBounded}) {
      const FrameTable<const float> sent[] = {table_of(codec, values.data(), false, wrong)};
      const auto failure = failure_of([&] { encode_frame(sent, {}); });
      REQUIRE(failure);
      CHECK_FALSE(failure->kind);
    }
  }
}
