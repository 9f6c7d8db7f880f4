#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "host/instruction_set.h"
#include "messages/reduction.h"

using namespace bls;

namespace {

template <class T>
using Sources = std::vector<std::vector<T>>;

/// Reduces into `out`; with `in_place`, into the source of that number.
template <class T>
std::vector<T> reduced(Element element, Reduction reduction, Sources<T> sources,
                       size_t in_place = SIZE_MAX) {
  std::vector<const std::byte*> at;
  for (const auto& source : sources) {
    at.push_back(reinterpret_cast<const std::byte*>(source.data()));
  }
  std::vector<T> apart(sources[0].size());
  std::vector<T>& out = in_place == SIZE_MAX ? apart : sources[in_place];
  reduce(element, reduction, at, out.size(), reinterpret_cast<std::byte*>(out.data()));
  return out;
}

/// Of many magnitudes, so that each order of additions gives another sum.
float term(size_t source, size_t index) {
  const auto seed = static_cast<int>(source * 7 + index % 1009 * 31);
  return std::ldexp(static_cast<float>(seed % 97 - 40), seed % 23 - 11);
}

Sources<float> floats(size_t sources, size_t count) {
  Sources<float> all(sources);
  for (size_t source = 0; source < sources; ++source) {
    for (size_t i = 0; i < count; ++i) all[source].push_back(term(source, i));
  }
  return all;
}

}  // namespace

TEST_CASE("sums of floats are those of doubles in the order of the sources, rounded once") {
  for (const size_t count : {1, 7, 1024, 1025, 5000}) {
    for (size_t sources = 1; sources <= 9; ++sources) {
      const Sources<float> terms = floats(sources, count);
      std::vector<float> sums, averages;
      for (size_t i = 0; i < count; ++i) {
        double sum = 0;
        for (const auto& source : terms) sum += source[i];
        sums.push_back(static_cast<float>(sum));
        averages.push_back(static_cast<float>(sum / static_cast<double>(sources)));
      }
      CHECK(reduced(Element::kFloat32, Reduction::kSum, terms) == sums);
      CHECK(reduced(Element::kFloat32, Reduction::kAverage, terms) == averages);
      for (size_t place = 0; place < sources; ++place) {
        CHECK(reduced(Element::kFloat32, Reduction::kSum, terms, place) == sums);
      }
    }
  }
}

TEST_CASE("halves are summed as floats") {
  // 2048 + 1 is 2048 in float16, twice; 256 + 1 is 256 in bfloat16.
  const Sources<uint16_t> halves{{0x6800}, {0x3c00}, {0x3c00}};
  const Sources<uint16_t> brains{{0x4380}, {0x3f80}, {0x3f80}};
  for (const std::string_view name : instruction_sets()) {
    use_instruction_set(name);
    CHECK(reduced(Element::kFloat16, Reduction::kSum, halves)[0] == 0x6801);   // 2050
    CHECK(reduced(Element::kBfloat16, Reduction::kSum, brains)[0] == 0x4381);  // 258
    CHECK(reduced(Element::kBfloat16, Reduction::kMax, brains)[0] == 0x4380);
  }
}

TEST_CASE("sums of integers wrap around") {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kLongMost = std::numeric_limits<int64_t>::max();
  CHECK(reduced<int32_t>(Element::kInt32, Reduction::kSum, {{kMost, 3}, {1, -5}}) ==
        std::vector<int32_t>{std::numeric_limits<int32_t>::min(), -2});
  CHECK(reduced<int64_t>(Element::kInt64, Reduction::kSum, {{kLongMost}, {1}}) ==
        std::vector<int64_t>{std::numeric_limits<int64_t>::min()});
}

TEST_CASE("the largest and the smallest") {
  const Sources<int64_t> numbers{{-3, 5}, {7, -9}, {0, 0}};
  CHECK(reduced(Element::kInt64, Reduction::kMax, numbers) == std::vector<int64_t>{7, 5});
  CHECK(reduced(Element::kInt64, Reduction::kMin, numbers) == std::vector<int64_t>{-3, -9});
  const Sources<double> doubles{{1.5}, {-2.5}};
  CHECK(reduced(Element::kFloat64, Reduction::kMin, doubles)[0] == -2.5);
}

TEST_CASE("a NaN of any source stays") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Reduction reduction :
       {Reduction::kSum, Reduction::kAverage, Reduction::kMax, Reduction::kMin}) {
    for (size_t place = 0; place < 3; ++place) {
      Sources<double> numbers{{1}, {2}, {3}};
      numbers[place][0] = nan;
      CHECK(std::isnan(reduced(Element::kFloat64, reduction, numbers)[0]));
    }
  }
}
