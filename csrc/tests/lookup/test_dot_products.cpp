#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "host/instruction_set.h"
#include "lookup/kernels/dot_products.h"

using namespace bls;

namespace {

/// The same product after product.
std::vector<float> one_by_one(const Rows& rows) {
  std::vector<float> to;
  for (size_t sample = 0; sample < rows.samples; ++sample) {
    const auto row = [&](size_t number) {
      return number == 0 ? rows.first + sample * rows.columns
                         : rows.others + (sample * rows.count + number - 1) * rows.columns;
    };
    to.insert(to.end(), row(0), row(0) + rows.columns);
    for (size_t a = 0; a <= rows.count; ++a) {
      for (size_t b = a + 1; b <= rows.count; ++b) {
        float sum = 0;
        for (size_t k = 0; k < rows.columns; ++k) sum = std::fma(row(b)[k], row(a)[k], sum);
        to.push_back(sum);
      }
    }
  }
  return to;
}

}  // namespace

TEST_CASE("dot products have the same bits with all instruction sets") {
  const std::string best(instruction_sets().back());
  std::mt19937 random(3);
  std::uniform_real_distribution<float> floats(-1e3F, 1e3F);
  for (const std::string_view name : instruction_sets()) {
    CAPTURE(name);
    use_instruction_set(name);
    for (const size_t count :
         {0u, 1u, 2u, 3u, 6u, 7u, 8u, 14u, 15u, 16u, 17u, 26u, 31u, 32u, 53u}) {
      CAPTURE(count);
      for (const size_t columns : {1u, 3u, 4u, 5u, 16u, 30u, 64u}) {
        CAPTURE(columns);
        constexpr size_t kSamples = 3;
        std::vector<float> first(kSamples * columns), others(kSamples * count * columns);
        for (float& value : first) value = floats(random);
        for (float& value : others) value = floats(random);
        const Rows rows{first.data(), others.data(), kSamples, count, columns};
        std::vector<float> expected = one_by_one(rows);
        expected.push_back(7);  // what is behind stays as it is
        std::vector<float> found(expected.size(), 7);
        dot_products(rows, found.data());
        CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
      }
    }
  }
  use_instruction_set(best);
}
