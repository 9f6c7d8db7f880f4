// No error-bounded value is farther from what was encoded than its bound, over as many hostile ones
// as are asked for: a program of its own, since the tests have no time for 10^9 values. Batch n is
// the same in every run, so that one that was stopped goes on where it was.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "codecs/bounded/bounded.h"
#include "codecs/bounded/grid.h"
#include "host/instruction_set.h"

namespace {

using namespace bls;

constexpr size_t kRows = 256, kColumns = 64, kValues = kRows * kColumns;
constexpr uint64_t kReport = 1000;  // batches

using Values = std::vector<float>;

/// So many floats farther from 0 or, with a negative number, closer to it.
float moved(float value, int places) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits += (bits & 0x7fffffff) > 16 ? places : 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Values that codes of so many bits exist for, and some that they just do not.
class Hostile {
 public:
  Hostile(uint64_t batch, float bound, int bits)
      : random_(batch), bound_(bound), grid_(bounded::grid_of(bound, bits)), bits_(bits) {}

  void fill(Values& values) {
    const auto kind = random_() % 4;
    for (float& value : values) value = one(kind);
    // At the last code: as many rows as may be escaped before codes get more bits.
    for (size_t row = 0; row < kRows; row += 80) values[row * kColumns + row % kColumns] = one(4);
  }

 private:
  float one(uint64_t kind) {
    const auto random = random_();
    const float sign = random & 1 ? 1.0f : -1.0f;
    const auto code = static_cast<float>((random >> 1 & 0xffff) % ((1u << (bits_ - 1)) - 1));
    const float part = static_cast<float>(random >> 40) * 0x1p-24f;
    const int places = static_cast<int>(random >> 20 & 7) - 3;
    switch (kind) {
      case 0:  // anywhere
        return sign * (code + part) * grid_.scale;
      case 1:  // between two codes, where rounding decides
        return sign * moved((code + 0.5f) * grid_.scale, places);
      case 2: {  // of any magnitude
        const float value = sign * std::ldexp(1.0f + part, static_cast<int>(code) % (bits_ + 8));
        return std::min(grid_.limit, std::max(-grid_.limit, value * 0x1p-8f * bound_));
      }
      case 3:  // around 0
        return sign * moved(part * 2 * bound_, places);
      default:
        return sign * moved(grid_.limit, places);
    }
  }

  std::mt19937_64 random_;
  float bound_;
  bounded::Grid grid_;
  int bits_;
};

float bound_of(uint64_t batch) {
  constexpr float kUsual[] = {0.01f, 0.02f, 0.03f, 0.05f, 0.001f, 0.1f};
  if (batch % 2 == 0) return kUsual[batch / 2 % std::size(kUsual)];
  std::mt19937_64 random(~batch);
  const auto part = static_cast<float>(random() >> 40) * 0x1p-24f;
  return std::ldexp(1.0f + part, static_cast<int>(random() % 235) - 126);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: %s VALUES [FIRST_BATCH]\n", argv[0]);
    return 1;
  }
  const uint64_t first = argc == 3 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const uint64_t last = first + (std::strtoull(argv[1], nullptr, 10) + kValues - 1) / kValues;
  const std::vector<std::string_view> sets = instruction_sets();
  Values values(kValues), back(kValues);
  std::vector<std::byte> bytes(bounded::max_bytes(kRows, kColumns));
  double worst = 0;  // of all errors, as a share of their bounds
  uint64_t escaped = 0;
  for (uint64_t batch = first; batch < last; ++batch) {
    use_instruction_set(sets[batch / 7 % sets.size()]);
    const float bound = bound_of(batch);
    Hostile(batch, bound, batch % 3 == 0 ? 16 : 8).fill(values);
    const size_t size = bounded::encode(bound, {values.data(), kRows, kColumns, kColumns}, {},
                                        batch % 5 == 0, bytes);
    bounded::decode(bound, {bytes.data(), size}, {back.data(), kRows, kColumns, kColumns}, {});
    for (size_t i = 0; i < kValues; ++i) {
      if (std::memcmp(&values[i], &back[i], sizeof back[i]) == 0) {
        ++escaped;  // or on the grid
        continue;
      }
      const double error = std::abs(double{values[i]} - double{back[i]});
      worst = std::max(worst, error / double{bound});
      if (error <= double{bound}) continue;
      std::printf("batch %llu: %a became %a with the bound %a\n",
                  static_cast<unsigned long long>(batch), double{values[i]}, double{back[i]},
                  double{bound});
      return 1;
    }
    if ((batch + 1 - first) % kReport == 0 || batch + 1 == last) {
      std::printf(
          "next batch %llu: %.4g values, %.4g of them as they were, largest error %.9f bounds\n",
          static_cast<unsigned long long>(batch + 1),
          static_cast<double>(batch + 1 - first) * kValues, static_cast<double>(escaped), worst);
      std::fflush(stdout);
    }
  }
  return 0;
}
