#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codecs/bounded/grid.h"
#include "codecs/bounded/kernels/kernels.h"
#include "errors.h"
#include "tests/support/encoded.h"

using namespace bls;
using namespace bls::testing;

namespace {

using Floats = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Floats random_rows(size_t count, float deviation, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = deviation * normal(random);
  return values;
}

/// Encoded in memory of just the size that was announced.
Bytes encoded(float bound, const Matrix<const float>& rows, const RowGroups& groups = {}) {
  Bytes out(bounded::encode(bound, rows, groups, false, {}));
  CHECK(bounded::encode(bound, rows, groups, false, out) == out.size());
  CHECK(out.size() >= bounded::min_bytes(groups.travelling(rows.rows), rows.columns));
  CHECK(out.size() <= bounded::max_bytes(groups.travelling(rows.rows), rows.columns));
  return out;
}

/// Of rows behind each other; what was not decoded is 7.
Floats decoded(float bound, const Bytes& bytes, size_t rows, size_t columns,
               const RowGroups& groups = {}) {
  Floats values(rows * columns, 7.0f);
  const Matrix<float> matrix{values.data(), rows, columns, columns};
  const size_t used = bounded::decode(bound, bytes, matrix, groups);
  CHECK(used == bytes.size());
  return values;
}

bool same_bits(const float* a, const float* b, size_t count) {
  return std::memcmp(a, b, count * sizeof *a) == 0;
}

double greatest_error(const Floats& values, const Floats& back) {
  double greatest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    greatest = std::max(greatest, std::abs(double{values[i]} - double{back[i]}));
  }
  return greatest;
}

/// The text of the error, or how many bytes are left over, or "".
std::string told(const Bytes& bytes, size_t rows, size_t columns, float bound = 0.5f) {
  Floats values(rows * columns);
  try {
    const size_t used = bounded::decode(bound, bytes, {values.data(), rows, columns, columns}, {});
    if (used != bytes.size()) return std::to_string(bytes.size() - used) + " bytes are left over";
  } catch (const ChannelError& error) {
    CHECK(error.kind() == ErrorKind::kProtocol);
    return error.what();
  }
  return "";
}

Bytes bytes_of(std::initializer_list<int> numbers) {
  Bytes bytes;
  for (const int number : numbers) bytes.push_back(static_cast<std::byte>(number));
  return bytes;
}

}  // namespace

TEST_SUITE_BEGIN("bounded");

TEST_CASE("no value is farther away than its bound, and a decoded row is encoded to itself") {
  on_each_instruction_set([] {
    for (const float bound : {0x1p-126f, 1e-30f, 0.003f, 0.01f, 0.05f, 1.0f, 0x1p110f}) {
      for (const float steps : {0.0f, 0.3f, 2.0f, 20.0f, 60.0f, 3000.0f, 20000.0f}) {
        for (const size_t columns : {1, 7, 8, 15, 16, 31, 32, 33, 64, 100}) {
          CAPTURE(bound);
          CAPTURE(steps);
          CAPTURE(columns);
          Floats values = random_rows(40 * columns, steps * bound, 1);
          // Halves of steps, where rounding decides.
          const float scale = bounded::grid_of(bound, 8).scale;
          for (size_t i = 0; i < values.size(); i += 3) {
            values[i] = std::nextafter((std::round(values[i] / scale) + 0.5f) * scale,
                                       i % 2 == 0 ? -kInfinity : kInfinity);
          }
          std::copy_n(values.begin(), columns, values.begin() + 20 * static_cast<long>(columns));
          const Bytes bytes = encoded(bound, {values.data(), 40, columns, columns});
          const Floats back = decoded(bound, bytes, 40, columns);
          CHECK(greatest_error(values, back) <= double{bound});
          const Bytes again = encoded(bound, {back.data(), 40, columns, columns});
          CHECK(decoded(bound, again, 40, columns) == back);
        }
      }
    }
  });
}

TEST_CASE("rows without codes come back bit for bit") {
  on_each_instruction_set([] {
    for (const float deviation : {0.2f, 5.0f}) {  // codes of 8 and of 16 bits
      CAPTURE(deviation);
      Floats values = random_rows(400 * 33, deviation, 2);
      const float limit = bounded::grid_of(0.01f, deviation < 1 ? 8 : 16).limit;
      const float escaped[] = {kNan, kInfinity, -kInfinity, 3e38f, std::nextafter(limit, 1e9f)};
      for (size_t i = 0; i < 5; ++i) values[(40 + 7 * i) * 33 + 8 * i] = escaped[i];
      values[100 * 33] = limit;
      values[101 * 33 + 32] = -limit;
      const Floats back = decoded(0.01f, encoded(0.01f, {values.data(), 400, 33, 33}), 400, 33);
      for (size_t row = 0; row < 400; ++row) {
        const bool is_escaped = row >= 40 && row <= 68 && row % 7 == 5;
        CHECK(same_bits(&values[row * 33], &back[row * 33], 33) == is_escaped);
      }
      CHECK(back[100 * 33] == limit);
      CHECK(back[101 * 33 + 32] == -limit);
    }
  });
}

TEST_CASE("equal rows and zero rows take next to nothing") {
  on_each_instruction_set([] {
    Floats values = random_rows(500 * 32, 1e-4f, 3);
    const size_t zero_rows = encoded(0.01f, {values.data(), 500, 32, 32}).size();
    CHECK(zero_rows == 3);
    values = random_rows(500 * 32, 0.1f, 3);
    const size_t all_new = encoded(0.01f, {values.data(), 500, 32, 32}).size();
    for (size_t row = 5; row < 500; ++row) {
      // In the same steps of the grid, though not the same.
      for (size_t i = 0; i < 32; ++i) {
        values[row * 32 + i] =
            decoded(0.01f, encoded(0.01f, {&values[row % 5 * 32 + i], 1, 1, 1}), 1, 1)[0] +
            static_cast<float>(row % 3) * 1e-3f;
      }
    }
    CHECK(encoded(0.01f, {values.data(), 500, 32, 32}).size() < all_new / 10);
  });
}

TEST_CASE("of known groups only the first rows travel") {
  on_each_instruction_set([] {
    const Floats values = random_rows(6 * 20, 1.0f, 4);
    const uint32_t of_row[] = {0, 1, 0, 2, 1, 0};
    const RowGroups groups{of_row, 3};
    const Bytes bytes = encoded(0.01f, {values.data(), 6, 20, 20}, groups);
    const Floats back = decoded(0.01f, bytes, 6, 20, groups);
    const size_t first[] = {0, 1, 3};
    Floats travelling;
    for (const size_t row : first) {
      travelling.insert(travelling.end(), &values[row * 20], &values[row * 20] + 20);
    }
    const Floats alone = decoded(0.01f, encoded(0.01f, {travelling.data(), 3, 20, 20}), 3, 20);
    CHECK(bytes == encoded(0.01f, {travelling.data(), 3, 20, 20}));
    for (size_t row = 0; row < 6; ++row) {
      CHECK(same_bits(&back[row * 20], &alone[of_row[row] * 20], 20));
    }
  });
}

TEST_CASE("rows may be columns of wider ones, and nothing is written beside them") {
  on_each_instruction_set([] {
    for (const size_t columns : {5, 32, 50}) {
      Floats values = random_rows(30 * (columns + 4), 0.3f, 5);
      const Matrix<const float> rows{values.data() + 2, 30, columns, columns + 4};
      const Bytes bytes = encoded(0.01f, rows);
      Floats back(values.size(), 7.0f);
      bounded::decode(0.01f, bytes, {back.data() + 2, 30, columns, columns + 4}, {});
      for (size_t i = 0; i < values.size(); ++i) {
        const size_t column = i % (columns + 4);
        const bool is_beside = column < 2 || column >= columns + 2;
        CHECK((back[i] == 7.0f) == is_beside);
      }
      for (size_t room = 0; room < bytes.size(); ++room) {
        Bytes memory(bytes.size(), std::byte{0xa5});
        CHECK(bounded::encode(0.01f, rows, {}, false, std::span(memory).first(room)) ==
              bytes.size());
        CHECK(std::count(memory.begin(), memory.end(), std::byte{0xa5}) ==
              static_cast<ptrdiff_t>(memory.size()));
      }
    }
  });
}

TEST_CASE("all instruction sets write the same bytes and read the same values") {
  for (const float deviation : {0.005f, 0.1f, 3.0f, 1e5f}) {
    const Floats values = random_rows(700 * 41, deviation, 6);
    use_instruction_set("portable");
    const Bytes expected = encoded(0.01f, {values.data(), 700, 41, 41});
    const Floats back = decoded(0.01f, expected, 700, 41);
    on_each_instruction_set([&] {
      CHECK(encoded(0.01f, {values.data(), 700, 41, 41}) == expected);
      CHECK(same_bits(decoded(0.01f, expected, 700, 41).data(), back.data(), back.size()));
    });
  }
}

TEST_CASE("what no encoder wrote is refused with what is wrong") {
  on_each_instruction_set([] {
    const auto wrong = [](std::initializer_list<int> bytes, size_t rows = 2) {
      return told(bytes_of(bytes), rows, 1);
    };
    // Two new rows of one value: their kinds are all 0, their codes all 3.
    CHECK(wrong({0, 0, 0, 0, 3}) == "");
    CHECK(wrong({0, 0, 0, 0, 3, 0}) == "1 bytes are left over");
    CHECK(wrong({}).find("no bytes") != std::string::npos);
    CHECK(wrong({9, 0, 0, 0, 3}).find("unknown form") != std::string::npos);
    // The same without kinds.
    CHECK(wrong({16, 0, 3}) == "");
    CHECK(wrong({16, 0}).find("end within the description") != std::string::npos);
    CHECK(wrong({25, 0, 3}).find("unknown form") != std::string::npos);
    CHECK(wrong({32, 0, 3}).find("unknown form") != std::string::npos);
    CHECK(wrong({0, 10, 0, 0, 3}).find("unknown kind") != std::string::npos);
    CHECK(wrong({0, 64, 0, 0, 3}).find("unknown kind") != std::string::npos);
    CHECK(wrong({0, 0}).find("end within the description") != std::string::npos);
    CHECK(wrong({0, 0, 0xfd}).find("rows are equal") != std::string::npos);  // kind -3
    CHECK(wrong({0, 0, 1}).find("rows are equal") != std::string::npos);     // which are before it
    CHECK(wrong({0, 0, 33}).find("rows are equal") != std::string::npos);
    CHECK(wrong({0, 1, 127}).find("more symbols than there are") != std::string::npos);
    // A row and one equal to it: codes of one bit for the symbols 0 and 1.
    CHECK(wrong({0, 1, 0, 0x40, 0, 3}) == "");
    CHECK(wrong({0, 1, 0, 0x80, 0, 3}).find("rows are equal") != std::string::npos);
    CHECK(wrong({0, 1, 0, 0x41, 0, 3}).find("stream") != std::string::npos);
    CHECK(wrong({0, 1, 0}).find("stream") != std::string::npos);
    // The same by lengths: a change of -10, 19 zeros, and none, with a one behind each.
    CHECK(wrong({0, 9, 0, 1, 0, 0, 0x18, 0x40, 0, 3}) == "");
    CHECK(wrong({0, 9, 0, 1, 0, 0, 0x19, 0x40, 0, 3}).find("lengths") != std::string::npos);
    CHECK(wrong({0, 9, 1, 0, 0, 0, 0x18, 0x40, 0, 3}).find("before its first") !=
          std::string::npos);
    CHECK(wrong({0, 9, 0, 1, 0, 0, 0x12, 0x40, 0, 3}).find("not complete") != std::string::npos);
    CHECK(wrong({0, 9, 0, 1, 0, 0, 0, 0, 0, 3}).find("impossible length") != std::string::npos);
    CHECK(wrong({0, 9, 0, 0, 0x20, 0, 0, 3}).find("more symbols than have") != std::string::npos);
    // Escaped and zero rows.
    CHECK(wrong({0, 0, 0xff}) == "");
    CHECK(wrong({0, 0, 0xfe, 0, 0, 0, 0, 0, 0, 0, 0}) == "");
    CHECK(wrong({0, 0, 0xfe, 0, 0, 0, 0, 0, 0, 0}).find("end within the values") !=
          std::string::npos);
    // Sixteen bits: two low bits of each value.
    CHECK(wrong({2, 0, 0, 0, 3, 0x70}) == "");
    CHECK(wrong({18, 0, 3, 0x70}) == "");
    CHECK(wrong({2, 0, 0, 0, 3, 0x71}).find("low bits") != std::string::npos);
    CHECK(wrong({2, 0, 0, 0, 3}).find("low bits") != std::string::npos);
    // As they are.
    CHECK(wrong({255, 0, 0, 0, 0}, 1) == "");
    CHECK(wrong({255, 0, 0, 0}, 1).find("not all of them") != std::string::npos);
    CHECK(told(bytes_of({0}), 0, 1) == "1 bytes are left over");
  });
}

TEST_CASE("sizes of streams are refused where they do not fit") {
  on_each_instruction_set([] {
    for (const size_t columns : {8, 48}) {  // four streams, and six
      const Floats values = random_rows(200 * columns, 0.1f, 7);
      const Bytes bytes = encoded(0.01f, {values.data(), 200, columns, columns});
      REQUIRE(told(bytes, 200, columns, 0.01f) == "");
      size_t found = 0;
      for (size_t at = 0; at < bytes.size(); ++at) {
        for (const int bit : {1, 0x80}) {
          Bytes other = bytes;
          other[at] ^= static_cast<std::byte>(bit);
          found += told(other, 200, columns, 0.01f).find("stream") != std::string::npos;
        }
      }
      CHECK(found > 10);
      for (size_t size = 0; size < bytes.size(); ++size) {
        const Bytes cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
        CHECK(told(cut, 200, columns, 0.01f) != "");
      }
    }
  });
}

TEST_CASE("streams of impossible sizes are refused") {
  on_each_instruction_set([] {
    // So many new rows of one value have four streams of one bit a value.
    const auto wrong = [](std::initializer_list<int> sizes) {
      Bytes bytes = bytes_of({16, 1, 0});
      const Bytes of_sizes = bytes_of(sizes);
      bytes.insert(bytes.end(), of_sizes.begin(), of_sizes.end());
      bytes.resize(bytes.size() + 128, std::byte{0x55});
      return told(bytes, 1024, 1);
    };
    CHECK(wrong({64, 0, 0}) == "");  // 32 bytes, and no change
    CHECK(wrong({64, 63, 0}).find("too short or too long") != std::string::npos);
    CHECK(wrong({64, 65, 0}).find("less than no bytes") != std::string::npos);
    CHECK(wrong({1, 0, 0}).find("less than no bytes") != std::string::npos);
    CHECK(wrong({0x80, 0, 0, 0}).find("more bytes than it needs") != std::string::npos);
    CHECK(wrong({0xfe, 0x7f, 0, 0}).find("end within a stream") != std::string::npos);
  });
}

TEST_CASE("rows whose hashes collide take few probes and arrive as they were") {
  // Codes of one word, which all instruction sets hash alike.
  constexpr size_t kColumns = 8, kDifferent = 2000, kRows = 2 * kDifferent;
  const size_t mask = std::bit_ceil(2 * kRows) - 1;
  const float scale = bounded::grid_of(0.5f, 8).scale;
  std::mt19937_64 random(1);
  Floats values;
  while (values.size() < kDifferent * kColumns) {
    const uint64_t word = random() & 0x3f3f3f3f3f3f3f3f;  // of codes that are not escaped
    uint64_t hash = word * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
    if (((hash ^ hash >> 32) & mask) != 0) continue;
    int8_t codes[kColumns];
    std::memcpy(codes, &word, sizeof codes);
    for (const int8_t code : codes) values.push_back(code * scale);
  }
  values.insert(values.end(), values.begin(), values.begin() + kDifferent * kColumns);
  on_each_instruction_set([&] {
    const Matrix<const float> rows{values.data(), kRows, kColumns, kColumns};
    std::vector<int8_t> kinds(kRows), codes((kRows + bounded::kRowsTogether) * kColumns);
    std::vector<uint32_t> earlier(kRows), slots(mask + 1);
    bounded::RowSearch search{rows,
                              nullptr,
                              kRows,
                              bounded::grid_of(0.5f, 8),
                              kinds.data(),
                              earlier.data(),
                              slots.data(),
                              mask,
                              0,
                              0,
                              0};
    bounded::kernels().find_rows8(search, codes.data());
    CHECK(search.new_count + search.earlier_count == kRows);
    CHECK(search.new_count > kDifferent);  // the others were not looked for to the end
    CHECK(decoded(0.5f, encoded(0.5f, rows), kRows, kColumns) == values);
  });
}

TEST_CASE("what a caller gets wrong") {
  const Floats values(12);
  const Matrix<const float> rows{values.data(), 3, 4, 4};
  for (const float bound : {0.0f, -1.0f, kNan, kInfinity, 1e-40f, 0x1p111f}) {
    CHECK_THROWS_AS(bounded::encode(bound, rows, {}, false, {}), std::invalid_argument);
    CHECK_THROWS_AS(decoded(bound, {}, 0, 0), std::invalid_argument);
  }
  const std::vector<std::vector<uint32_t>> wrong = {{0, 2, 1}, {1, 0, 0}, {0, 0}, {0, 0, 0}};
  for (const auto& of_row : wrong) {
    CHECK_THROWS_AS(bounded::encode(0.1f, rows, {of_row, 2}, false, {}), std::invalid_argument);
  }
  Floats out(12);
  for (const auto& of_row : wrong) {
    // Two zero rows, and rows of no columns.
    for (const size_t columns : {4, 0}) {
      const Bytes bytes = columns > 0 ? bytes_of({0, 0, 0xff}) : Bytes();
      CHECK_THROWS_AS(bounded::decode(0.1f, bytes, {out.data(), 3, columns, columns}, {of_row, 2}),
                      std::invalid_argument);
    }
  }
}

TEST_SUITE_END();
