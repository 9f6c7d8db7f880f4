#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "host/instruction_set.h"
#include "lookup/kernels/sum_bags.h"
#include "tests/lookup/bytes.h"

using namespace bls;
using bls::testing::bytes;

namespace {

/// The same float after float: products fused with the sums, means by the inverse.
void sum_one_by_one(const Bags& bags, float* to, size_t stride) {
  const size_t columns = bags.row_bytes / sizeof(float);
  for (size_t bag = 0; bag < bags.count; ++bag, to += stride) {
    const size_t begin = bags.starts[bag], end = bags.starts[bag + 1];
    for (size_t k = 0; k < columns; ++k) {
      float sum = 0;
      for (size_t i = begin; i < end; ++i) {
        int64_t id = 0;
        std::memcpy(&id, bags.ids + i * bags.id_bytes, bags.id_bytes);
        float value;
        std::memcpy(&value, bags.table + static_cast<size_t>(id) * bags.row_bytes + k * 4, 4);
        sum = bags.weights != nullptr ? std::fma(bags.weights[i], value, sum) : sum + value;
      }
      to[k] = bags.means && end > begin ? sum * (1.0f / static_cast<float>(end - begin)) : sum;
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("sums have the same bits with all instruction sets", Id, int32_t, int64_t) {
  const std::string best(instruction_sets().back());
  std::mt19937 random(3);
  std::uniform_real_distribution<float> floats(-1e3F, 1e3F);
  for (const std::string_view name : instruction_sets()) {
    CAPTURE(name);
    use_instruction_set(name);
    for (const size_t columns : {1u, 3u, 4u, 7u, 8u, 12u, 15u, 16u, 24u, 31u, 40u, 48u, 64u, 100u,
                                 128u, 200u, 259u, 517u}) {
      CAPTURE(columns);
      constexpr size_t kRows = 50, kBags = 13;
      // One float behind a boundary of 8 bytes, as a table within another tensor may begin.
      std::vector<float> table(1 + kRows * columns);
      for (float& value : table) value = random() % 10 == 0 ? -0.0F : floats(random);
      std::vector<size_t> starts{2};  // ids of other bags come first
      for (size_t bag = 0; bag < kBags; ++bag) {
        starts.push_back(starts.back() + std::vector<size_t>{0, 1, 2, 9, 40}[random() % 5]);
      }
      std::vector<Id> ids;
      std::vector<float> weights;
      for (size_t i = 0; i < starts.back(); ++i) {
        ids.push_back(static_cast<Id>(random() % kRows));
        weights.push_back(floats(random));
      }
      for (const bool weighted : {false, true}) {
        for (const bool means : {false, true}) {
          const Bags bags{bytes(table.data() + 1),
                          columns * sizeof(float),
                          bytes(ids.data()),
                          sizeof(Id),
                          weighted ? weights.data() : nullptr,
                          starts.data(),
                          kBags,
                          means};
          const size_t stride = columns + 2;
          std::vector<float> expected(kBags * stride, 7), found(kBags * stride, 7);
          sum_one_by_one(bags, expected.data(), stride);
          sum_bags(bags, reinterpret_cast<std::byte*>(found.data()), stride * sizeof(float));
          CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
        }
      }
    }
  }
  use_instruction_set(best);
}
