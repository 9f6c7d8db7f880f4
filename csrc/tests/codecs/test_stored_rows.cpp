#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "codecs/stored_rows.h"
#include "tests/support/encoded.h"

using namespace bls;
using namespace bls::testing;

namespace {

/// Stored in memory of just the size that the rows take.
Bytes stored(const std::vector<float>& values, size_t columns, size_t row_bytes, size_t expected) {
  const size_t rows = values.size() / columns;
  Bytes out(rows * row_bytes, std::byte{77});
  CHECK(stored_rows::store_int8({values.data(), rows, columns, columns}, row_bytes, out.data()) ==
        expected);
  return out;
}

Bytes stored_bytes(std::initializer_list<int> numbers) {
  Bytes bytes;
  for (const int number : numbers) bytes.push_back(static_cast<std::byte>(number));
  return bytes;
}

}  // namespace

TEST_CASE("stored rows have scale, shift, codes and zeros") {
  // A scale of 1 and a shift of -2; then a row without width, whose scale is 1.
  CHECK(stored({-2, 0.5, 1.5, 253, 3, 3, 3, 3}, 4, 10, 2) ==
        stored_bytes({0x00, 0x3c, 0x00, 0xc0, 0, 2, 4, 255, 0, 0,  //
                      0x00, 0x3c, 0x00, 0x42, 0, 0, 0, 0,   0, 0}));
}

TEST_CASE("stored rows end before the first one that is not ours") {
  const float others[] = {std::nanf(""), std::numeric_limits<float>::infinity(), -0.0f, 1e6f * 64};
  for (const float other : others) {
    const Bytes out = stored({0, 255, 0, other, 0, 255}, 2, 6, 1);
    CHECK(out[0] == std::byte{0});
    CHECK(out[6] == std::byte{77});
  }
}

TEST_CASE("stored rows are the same by all instruction sets") {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const size_t columns : {1, 15, 16, 17, 63, 64, 65, 128, 200}) {
    std::vector<float> values(50 * columns);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::ldexp(normal(random), static_cast<int>(i / columns) % 40 - 25);
    }
    Bytes first;
    on_each_instruction_set([&] {
      const Bytes out = stored(values, columns, 4 + columns + columns % 3, 50);
      if (first.empty()) first = out;
      CHECK(out == first);
    });
  }
}

TEST_CASE("stored rows need room") {
  const float value = 0;
  std::byte out[5];
  CHECK_THROWS_AS(stored_rows::store_int8({&value, 1, 1, 1}, 4, out), std::invalid_argument);
  CHECK_THROWS_AS(stored_rows::store_int8({&value, 1, 0, 0}, 5, out), std::invalid_argument);
}
