#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "host/instruction_set.h"
#include "lookup/kernels/sum_parts.h"

using namespace bls;

namespace {

/// The same float after float, a part after the other.
void sum_one_by_one(const PartedBags& bags, float* to, size_t stride) {
  for (size_t bag = 0; bag < bags.count; ++bag, to += stride) {
    for (size_t k = 0; k < bags.row_bytes / sizeof(float); ++k) {
      for (size_t part = 0; part < bags.part_count; ++part) {
        float sum = 0;
        for (size_t i = bags.starts[bag]; i < bags.starts[bag + 1]; ++i) {
          if (bags.parts[i] != part) continue;
          float value;
          std::memcpy(&value, bags.rows[i] + k * sizeof(float), sizeof(value));
          sum = bags.weights != nullptr ? std::fma(bags.weights[i], value, sum) : sum + value;
        }
        to[k] = part == 0 ? sum : to[k] + sum;
      }
    }
  }
}

}  // namespace

TEST_CASE("sums in parts have the same bits with all instruction sets") {
  const std::string best(instruction_sets().back());
  std::mt19937 random(4);
  std::uniform_real_distribution<float> floats(-1e3F, 1e3F);
  for (const std::string_view name : instruction_sets()) {
    CAPTURE(name);
    use_instruction_set(name);
    for (const size_t columns :
         {1u, 3u, 4u, 8u, 12u, 15u, 16u, 24u, 31u, 32u, 64u, 100u, 128u, 259u}) {
      for (const size_t parts : {1u, 2u, 4u, 7u, 300u}) {
        CAPTURE(columns);
        CAPTURE(parts);
        constexpr size_t kRows = 50, kBags = 13;
        // One float behind a boundary of 8 bytes.
        std::vector<float> table(1 + kRows * columns);
        for (float& value : table) value = random() % 10 == 0 ? -0.0F : floats(random);
        std::vector<size_t> starts{2};  // rows of other bags come first
        for (size_t bag = 0; bag < kBags; ++bag) {
          starts.push_back(starts.back() + std::vector<size_t>{0, 1, 2, 9, 40}[random() % 5]);
        }
        std::vector<const std::byte*> rows;
        std::vector<uint32_t> of_rows;
        std::vector<float> weights;
        for (size_t i = 0; i < starts.back(); ++i) {
          const float* const row = table.data() + 1 + random() % kRows * columns;
          rows.push_back(reinterpret_cast<const std::byte*>(row));
          of_rows.push_back(static_cast<uint32_t>(random() % parts));
          weights.push_back(random() % 10 == 0 ? -1e-45F : floats(random));
        }
        for (const bool weighted : {false, true}) {
          std::vector<float> sums(parts * columns, 5);  // of another call
          PartedBags bags;
          bags.rows = rows.data();
          bags.parts = of_rows.data();
          bags.part_count = parts;
          bags.row_bytes = columns * sizeof(float);
          bags.weights = weighted ? weights.data() : nullptr;
          bags.starts = starts.data();
          bags.count = kBags;
          bags.sums = reinterpret_cast<std::byte*>(sums.data());
          const size_t stride = columns + 2;
          std::vector<float> expected(kBags * stride, 7), found(kBags * stride, 7);
          sum_one_by_one(bags, expected.data(), stride);
          sum_parts(bags, reinterpret_cast<std::byte*>(found.data()), stride * sizeof(float));
          CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
        }
      }
    }
  }
  use_instruction_set(best);
}
