#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <random>
#include <vector>

#include "codecs/bounded/symbols/standard_codes.h"
#include "codecs/bounded/symbols/symbols.h"
#include "tests/support/encoded.h"

using namespace bls;
using namespace bls::bounded;
using bls::testing::on_each_instruction_set;

namespace {

uint64_t bits_by(const CodeLengths& code, const Counts& counts) {
  uint64_t bits = 0;
  for (size_t i = 0; i < counts.size(); ++i) bits += uint64_t{counts[i]} * code.of[i];
  return bits;
}

/// Of Huffman's code, whose lengths have no limit.
uint64_t huffman_bits(const Counts& counts) {
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> weights;
  for (const uint32_t count : counts) {
    if (count > 0) weights.push(count);
  }
  uint64_t bits = 0;
  while (weights.size() > 1) {
    uint64_t pair = weights.top();
    weights.pop();
    pair += weights.top();
    weights.pop();
    weights.push(pair);
    bits += pair;
  }
  return bits;
}

/// The least bits of `counts`, the rarest last, with lengths from `length` on, in `left` parts of
/// the longest code's share: all codes are tried.
uint64_t least_bits(const std::vector<uint32_t>& counts, size_t at, int length, int left) {
  if (at == counts.size()) return left == 0 ? 0 : UINT64_MAX;
  uint64_t least = UINT64_MAX;
  for (; length <= kLongestCode; ++length) {
    const int share = 1 << (kLongestCode - length);
    if (share > left) continue;
    const uint64_t rest = least_bits(counts, at + 1, length, left - share);
    if (rest != UINT64_MAX) least = std::min(least, rest + uint64_t{counts[at]} * length);
  }
  return least;
}

}  // namespace

TEST_SUITE_BEGIN("bounded");

TEST_CASE("codes are as good as Huffman's where these are short enough") {
  std::mt19937 random(1);
  for (int turn = 0; turn < 300; ++turn) {
    Counts counts{};
    const int symbols = 2 + turn % 200;
    for (int i = 0; i < symbols; ++i) counts[static_cast<size_t>(i)] = 1 + random() % 40;
    for (const CodeLengths& code : {best_code(counts), good_code(counts)}) {
      CHECK(is_complete(code));
      CHECK(*std::max_element(code.of.begin(), code.of.end()) <= kLongestCode);
      CHECK(bits_by(code, counts) >= huffman_bits(counts));
      if (symbols < 40) CHECK(bits_by(code, counts) == huffman_bits(counts));
    }
  }
}

TEST_CASE("codes are the best of at most eleven bits where Huffman's are longer") {
  std::vector<uint32_t> growing = {1, 1};
  while (growing.size() < 15) growing.push_back(growing.end()[-1] + growing.end()[-2]);
  for (size_t symbols = 12; symbols <= growing.size(); ++symbols) {
    Counts counts{};
    std::copy_n(growing.begin(), symbols, counts.begin());
    const CodeLengths code = best_code(counts);
    CHECK(is_complete(code));
    if (symbols > 12) CHECK(bits_by(code, counts) > huffman_bits(counts));
    const std::vector<uint32_t> falling(growing.rend() - static_cast<ptrdiff_t>(symbols),
                                        growing.rend());
    CHECK(bits_by(code, counts) == least_bits(falling, 0, 1, 1 << kLongestCode));
  }
}

TEST_CASE("a good code that had to be shortened is complete and hardly worse than the best one") {
  std::mt19937 random(3);
  for (int turn = 0; turn < 300; ++turn) {
    Counts counts{};
    // Weights fall by a factor of up to two from symbol to symbol, down to 1.
    const double factor = 1.1 + 0.003 * turn;
    double weight = 1e6;
    for (int i = 0; i < 2 + turn % 254; ++i, weight = std::max(1.0, weight / factor)) {
      counts[random() % kSymbols] = static_cast<uint32_t>(weight);
    }
    if (std::count(counts.begin(), counts.end(), 0u) > kSymbols - 2) continue;
    const CodeLengths good = good_code(counts);
    CHECK(is_complete(good));
    CHECK(*std::max_element(good.of.begin(), good.of.end()) <= kLongestCode);
    const uint64_t best = bits_by(best_code(counts), counts);
    CHECK(bits_by(good, counts) >= best);
    CHECK(bits_by(good, counts) <= best + best / 100);
  }
}

TEST_CASE("symbols of which none is as frequent as two others have a code of fixed width") {
  std::mt19937 random(4);
  for (int bits = 1; bits <= 8; ++bits) {
    CAPTURE(bits);
    const int first = bits == 8 ? 0 : static_cast<int>(random() % (kSymbols - (1u << bits)));
    Counts counts{};
    std::vector<int8_t> symbols;
    for (int place = first; place < first + (1 << bits); ++place) {
      const uint32_t count = 100 + random() % 101;
      counts[static_cast<size_t>(place)] = count;
      symbols.insert(symbols.end(), count, static_cast<int8_t>(place - place_of(0)));
    }
    std::shuffle(symbols.begin(), symbols.end(), random);
    const CodeLengths best = best_code(counts);
    for (int place = best.first; place <= best.last; ++place) {
      CHECK(best.of[static_cast<size_t>(place)] == bits);
    }
    bls::testing::Bytes bytes(room_for_symbols(symbols.size()));
    const std::byte* const end = write_symbols(symbols.data(), symbols.size(), false, bytes.data());
    CHECK(static_cast<int>(bytes[0]) == bits);
    std::vector<int8_t> back(symbols.size());
    CHECK(read_symbols(bytes.data(), end, back.data(), back.size()) == end);
    CHECK(back == symbols);
  }
}

TEST_CASE("standard codes are complete, even on both sides, and ever wider") {
  for (int number = 0; number < kStandardCodes; ++number) {
    const CodeLengths& code = standard_code(number).lengths;
    CAPTURE(number);
    CHECK(is_complete(code));
    CHECK(code.first - place_of(0) == place_of(0) - code.last);
    if (number % (kStandardCodes / 2) > 0) {
      const CodeLengths& narrower = standard_code(number - 1).lengths;
      CHECK(code.last >= narrower.last);
      CHECK(code.of[128] >= narrower.of[128]);
    }
  }
}

TEST_CASE("symbols come back, however many and however spread") {
  std::mt19937 random(2);
  on_each_instruction_set([&] {
    for (const size_t count : {1, 2, 9, 1023, 1024, 1025, 1027, 5000, 8191, 8192, 8195, 9000}) {
      for (const double spread : {0.0, 0.4, 3.0, 30.0, 1000.0}) {
        CAPTURE(count);
        CAPTURE(spread);
        std::normal_distribution<double> normal;
        std::vector<int8_t> symbols(count);
        for (int8_t& symbol : symbols) {
          symbol = static_cast<int8_t>(std::clamp(spread * normal(random), -128.0, 127.0));
        }
        bls::testing::Bytes bytes(room_for_symbols(count));
        const std::byte* const end = write_symbols(symbols.data(), count, false, bytes.data());
        bytes.resize(static_cast<size_t>(end - bytes.data()));
        // Memory of just the size, so that sanitizers see what is read beyond.
        const bls::testing::Bytes exact(bytes);
        std::vector<int8_t> back(count, 99);
        CHECK(read_symbols(exact.data(), exact.data() + exact.size(), back.data(), count) ==
              exact.data() + exact.size());
        CHECK(back == symbols);
      }
    }
  });
}

TEST_CASE("symbols come back where the sizes of streams take more or less room than the average") {
  std::mt19937 random(5);
  for (const size_t quarter : {300, 1000, 40000}) {
    for (size_t noisy = 0; noisy < 4; ++noisy) {
      CAPTURE(quarter);
      CAPTURE(noisy);
      std::vector<int8_t> symbols(4 * quarter);
      for (size_t i = 0; i < quarter; ++i) {
        symbols[noisy * quarter + i] = static_cast<int8_t>(random());
      }
      bls::testing::Bytes bytes(room_for_symbols(symbols.size()));
      const std::byte* const end =
          write_symbols(symbols.data(), symbols.size(), false, bytes.data());
      std::vector<int8_t> back(symbols.size());
      CHECK(read_symbols(bytes.data(), end, back.data(), back.size()) == end);
      CHECK(back == symbols);
    }
  }
}

TEST_SUITE_END();
