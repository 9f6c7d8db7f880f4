#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <vector>

#include "messages/rows/output_writer.h"

using namespace bls;

namespace {

constexpr size_t kFloats = 70;  // more than a line, with what is left over at both ends
constexpr size_t kSizes[] = {1, OutputWriter::kStreamedBytes};

std::vector<std::vector<float>> random_terms(size_t count) {
  std::mt19937 random(7);
  std::vector<std::vector<float>> terms(count, std::vector<float>(2 * kFloats));
  for (auto& term : terms) {
    for (float& each : term) each = static_cast<float>(random()) * 1e-3F - 1e6F;
  }
  return terms;
}

}  // namespace

TEST_CASE("sums are those of one float after the other, at any address, and nothing else changes") {
  for (const size_t size : kSizes) {
    const OutputWriter writer(size);
    for (size_t count = 1; count <= 5; ++count) {
      const auto terms = random_terms(count);
      std::vector<const std::byte*> addresses;
      for (const auto& term : terms) {
        addresses.push_back(reinterpret_cast<const std::byte*>(term.data()));
      }
      for (size_t first = 0; first < 8; ++first) {
        for (size_t floats = 0; floats + 8 <= kFloats; ++floats) {
          std::vector<float> expected(kFloats, -1), found(kFloats, -1);
          const size_t offset = floats % 5;
          for (size_t i = 0; i < floats; ++i) {
            float sum = terms[0][offset + i];
            for (size_t term = 1; term < count; ++term) sum += terms[term][offset + i];
            expected[first + i] = sum;
          }
          writer.sum(reinterpret_cast<std::byte*>(found.data() + first), addresses,
                     offset * sizeof(float), floats * sizeof(float));
          CHECK(std::memcmp(found.data(), expected.data(), kFloats * sizeof(float)) == 0);
        }
      }
    }
  }
}

TEST_CASE("copies are of any number of bytes between any two addresses") {
  std::vector<unsigned char> from(256);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 37);
  for (const size_t size : kSizes) {
    const OutputWriter writer(size);
    for (size_t to = 0; to < 17; ++to) {
      for (size_t bytes = 0; bytes < 200; ++bytes) {
        std::vector<unsigned char> expected(256, 255), found(256, 255);
        const size_t start = bytes % 7;
        std::memcpy(expected.data() + to, from.data() + start, bytes);
        writer.copy(reinterpret_cast<std::byte*>(found.data() + to),
                    reinterpret_cast<const std::byte*>(from.data() + start), bytes);
        CHECK(found == expected);
      }
    }
    writer.copy(reinterpret_cast<std::byte*>(from.data()),
                reinterpret_cast<const std::byte*>(from.data()), from.size());  // in its place
  }
}
