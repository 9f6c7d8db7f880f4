#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/instruction_set.h"
#include "lookup/direct/direct_batch.h"
#include "tests/lookup/bytes.h"

using namespace bls;
using bls::testing::bytes;

namespace {

/// A table of floats, cut into blocks of rows and pieces of columns that lie anywhere.
struct CutTable {
  CutTable(size_t row_count, size_t column_count, size_t blocks, std::vector<size_t> pieces,
           std::mt19937& random)
      : rows(row_count), columns(column_count), whole(rows * columns) {
    for (float& value : whole) {
      value = random() % 10 == 0 ? -0.0F : std::ldexp(float(random() % 2000) - 1000, -9);
    }
    const size_t per_block = (rows + blocks - 1) / blocks;
    size_t first = 0;
    for (const size_t width : pieces) {
      const BlockLength length(static_cast<int64_t>(per_block));
      TableColumns piece{first * sizeof(float), width * sizeof(float), length, {}, {}};
      for (size_t block = 0; block < blocks; ++block) {
        std::vector<float>& part = memory.emplace_back();
        for (size_t row = block * per_block; row < std::min(rows, (block + 1) * per_block); ++row) {
          const float* const from = whole.data() + row * columns + first;
          part.insert(part.end(), from, from + width);
        }
        piece.blocks.push_back(bytes(part.data()));
        piece.owners.push_back(block + pieces_of.size());
      }
      pieces_of.push_back(piece);
      first += width;
    }
  }

  size_t rows, columns;
  std::vector<float> whole;
  std::vector<std::vector<float>> memory;
  std::vector<TableColumns> pieces_of;
};

/// What ranks that own a block each would send, added in their order.
std::vector<float> sum_by_blocks(const CutTable& table, const std::vector<int64_t>& ids,
                                 const std::vector<float>& weights, size_t begin, size_t end,
                                 bool means) {
  const TableColumns& piece = table.pieces_of[0];
  std::vector<float> total(table.columns, 0);
  for (size_t block = 0; block < piece.blocks.size(); ++block) {
    for (size_t k = 0; k < table.columns; ++k) {
      float sum = 0;
      for (size_t i = begin; i < end; ++i) {
        if (piece.blocks.size() > 1 &&
            static_cast<size_t>(ids[i]) / piece.rows_per_block.rows() != block) {
          continue;
        }
        const float value = table.whole[static_cast<size_t>(ids[i]) * table.columns + k];
        sum = weights.empty() ? sum + value : std::fma(weights[i], value, sum);
      }
      if (means && end > begin) sum *= 1.0F / static_cast<float>(end - begin);
      total[k] = block == 0 ? sum : total[k] + sum;
    }
  }
  return total;
}

struct JaggedBatch {
  std::vector<int32_t> lengths;
  std::vector<int64_t> ids, counts;
  std::vector<int32_t> narrow;  ///< ids
  std::vector<float> weights;
  size_t samples = 0;
  std::vector<int64_t> rows_read = std::vector<int64_t>(8, 1000);

  DirectBatch of(std::span<const ShardedFeature> features, size_t id_bytes = 8) {
    narrow.assign(ids.begin(), ids.end());
    const std::byte* const values = id_bytes == 4 ? bytes(narrow.data()) : bytes(ids.data());
    JaggedIds jagged{bytes(lengths.data()), 4,       values,    id_bytes, nullptr, 0,
                     counts.size(),         samples, ids.size()};
    if (!weights.empty()) {
      jagged.weights = bytes(weights.data());
      jagged.weight_bytes = 4;
    }
    return {jagged, counts, features, rows_read};
  }

  /// What `rows_read` is after one lookup.
  std::vector<int64_t> rows_to_read(std::span<const ShardedFeature> features) const {
    std::vector<int64_t> expected(8, 1000);
    for (const ShardedFeature& feature : features) {
      const auto begin = std::accumulate(counts.begin(), counts.begin() + feature.key, 0L);
      for (int64_t i = begin; i < begin + counts[feature.key]; ++i) {
        for (const TableColumns& piece : feature.columns) {
          const size_t block = static_cast<size_t>(ids[i]) / piece.rows_per_block.rows();
          ++expected[piece.owners[block]];
        }
      }
    }
    return expected;
  }
};

JaggedBatch draw(size_t samples, const std::vector<size_t>& rows, bool weighted,
                 std::mt19937& random, const std::vector<int32_t>& lengths = {0, 1, 1, 2, 70}) {
  JaggedBatch batch;
  batch.samples = samples;
  for (const size_t of_key : rows) {
    batch.counts.push_back(0);
    for (size_t sample = 0; sample < samples; ++sample) {
      batch.lengths.push_back(lengths[random() % lengths.size()]);
      batch.counts.back() += batch.lengths.back();
      for (int i = 0; i < batch.lengths.back(); ++i) {
        batch.ids.push_back(static_cast<int64_t>(random() % of_key));
        // Products that vanish are -0.0 unless a block without rows is added.
        const float weight = random() % 4 == 0 ? -1e-45F : float(random() % 100) / 8;
        if (weighted) batch.weights.push_back(weight);
      }
    }
  }
  return batch;
}

}  // namespace

TEST_CASE("the block of an id is its quotient by the rows of a block") {
  std::mt19937_64 random(11);
  const int64_t most = int64_t{1} << 32;
  std::vector<int64_t> lengths{1, 2, 3, 7, 4096, 1000003, most - 1, most, most + 1, most * 1000};
  for (int i = 0; i < 200; ++i) {
    lengths.push_back(1 + static_cast<int64_t>(random() >> (2 + random() % 60)));
  }
  for (const int64_t rows : lengths) {
    const BlockLength length(rows);
    std::vector<int64_t> ids{0, 1, most - 2, most - 1, most, most + 1, INT64_MAX};
    // On both sides of the borders of blocks, where a factor that is not exact would err first.
    for (int i = 0; i < 200; ++i) {
      const int64_t border = static_cast<int64_t>(random() >> (2 + random() % 60)) / rows * rows;
      if (border > 0) ids.push_back(border - 1);
      ids.push_back(border);
    }
    for (const int64_t id : ids) {
      CAPTURE(rows);
      CAPTURE(id);
      REQUIRE(length.block_of(id) == static_cast<size_t>(id / rows));
    }
  }
}

TEST_CASE("sums over blocks have the bits of partial sums that ranks would send") {
  const std::string best(instruction_sets().back());
  std::mt19937 random(5);
  for (const std::string_view name : instruction_sets()) {
    use_instruction_set(name);
    for (const bool weighted : {false, true}) {
      for (const size_t blocks : {1u, 2u, 3u, 8u}) {
        for (const size_t samples : {0u, 1u, 5u, 120u, 3001u}) {
          // More ids than are found at once: long bags, or many of one id at most.
          const std::vector<int32_t> lengths =
              samples == 3001 ? std::vector{0, 1} : std::vector{0, 1, 1, 2, 70};
          CAPTURE(name);
          CAPTURE(blocks);
          CAPTURE(samples);
          CutTable a(41, 12, blocks, {12}, random), b(7, 33, blocks, {33}, random);
          const std::vector<ShardedFeature> features{{1, 0, blocks == 1, b.pieces_of},
                                                     {0, 33 * 4, false, a.pieces_of},
                                                     {2, 45 * 4, false, a.pieces_of}};
          JaggedBatch batch = draw(samples, {41, 7, 41}, weighted, random, lengths);
          std::vector<float> out(samples * 57, 77.0F), expected;
          const size_t id_bytes = samples % 2 == 0 ? 8 : 4;
          sum_rows_directly(batch.of(features, id_bytes), 57 * 4,
                            std::as_writable_bytes(std::span(out)));
          std::vector<size_t> starts{0};
          for (const int32_t length : batch.lengths) {
            starts.push_back(starts.back() + static_cast<size_t>(length));
          }
          for (size_t sample = 0; sample < samples; ++sample) {
            for (const ShardedFeature& feature : features) {
              const size_t bag = feature.key * samples + sample;
              const std::vector<float> sums =
                  sum_by_blocks(feature.key == 1 ? b : a, batch.ids, batch.weights, starts[bag],
                                starts[bag + 1], feature.means);
              expected.insert(expected.end(), sums.begin(), sums.end());
            }
          }
          const bool same = samples == 0 || std::memcmp(out.data(), expected.data(),
                                                        out.size() * sizeof(float)) == 0;
          CHECK(same);
          CHECK(batch.rows_read == batch.rows_to_read(features));
        }
      }
    }
  }
  use_instruction_set(best);
}

TEST_CASE("rows are put together from blocks and pieces of columns") {
  std::mt19937 random(6);
  for (const size_t width : {16u, 20u, 64u, 128u}) {
    CAPTURE(width);
    CutTable whole(30, width, 1, {width}, random), rows(50, width, 4, {width}, random),
        columns(9, width, 1, {width / 4, width - width / 4}, random);
    const std::vector<ShardedFeature> features{{2, 0, false, columns.pieces_of},
                                               {0, 0, false, whole.pieces_of},
                                               {1, 0, false, rows.pieces_of},
                                               {0, 0, false, rows.pieces_of}};
    const std::vector<const CutTable*> tables{&columns, &whole, &rows, &rows};
    JaggedBatch batch = draw(70, {30, 50, 9}, false, random);
    std::vector<float> expected;
    for (size_t place = 0; place < features.size(); ++place) {
      const size_t key = features[place].key;
      const auto begin = std::accumulate(batch.counts.begin(), batch.counts.begin() + key, 0L);
      for (int64_t i = begin; i < begin + batch.counts[key]; ++i) {
        const float* const row =
            tables[place]->whole.data() + static_cast<size_t>(batch.ids[i]) * width;
        expected.insert(expected.end(), row, row + width);
      }
    }
    std::vector<float> out(expected.size(), 77.0F);
    copy_rows_directly(batch.of(features), width * 4, std::as_writable_bytes(std::span(out)));
    const bool same = std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0;
    CHECK(same);
    CHECK(batch.rows_read == batch.rows_to_read(features));
  }
}

TEST_CASE("counts that do not fit a batch are refused") {
  std::mt19937 random(7);
  CutTable table(5, 4, 2, {4}, random);
  JaggedBatch batch = draw(3, {5}, false, random);
  batch.ids.resize(4);
  std::vector<float> out(100);
  const auto look_up = [&](std::vector<int64_t> counts, size_t key) {
    const std::vector<ShardedFeature> features{{key, 0, false, table.pieces_of}};
    batch.counts = counts;
    copy_rows_directly(batch.of(features), 16, std::as_writable_bytes(std::span(out)));
  };
  CHECK_THROWS_AS(look_up({5}, 0), std::invalid_argument);
  CHECK_THROWS_AS(look_up({-1}, 0), std::invalid_argument);
  CHECK_THROWS_AS(look_up({2, 3}, 0), std::invalid_argument);
  CHECK_THROWS_AS(look_up({4}, 1), std::invalid_argument);
  batch.rows_read.resize(1);  // of one owner, but the table has two
  CHECK_THROWS_AS(look_up({4}, 0), std::invalid_argument);
}

TEST_CASE("outputs of another size than the rows are refused, and nothing is written") {
  std::mt19937 random(8);
  CutTable table(5, 4, 2, {4}, random);
  JaggedBatch batch = draw(3, {5}, false, random);
  const auto count = static_cast<size_t>(batch.counts[0]);
  const std::vector<float> untouched(4 * count + 40, 77.0F);
  std::vector<float> memory = untouched;
  const auto bytes_of = [&](size_t floats) {
    return std::as_writable_bytes(std::span(memory).first(floats));
  };
  const std::vector<ShardedFeature> features{{0, 0, false, table.pieces_of}};
  const DirectBatch rows = batch.of(features);
  CHECK_THROWS_AS(copy_rows_directly(rows, 16, bytes_of(4 * count - 4)), std::invalid_argument);
  CHECK_THROWS_AS(copy_rows_directly(rows, 16, bytes_of(4 * count + 4)), std::invalid_argument);
  CHECK_THROWS_AS(copy_rows_directly(rows, 8, bytes_of(2 * count)), std::invalid_argument);
  CHECK_THROWS_AS(sum_rows_directly(rows, 16, bytes_of(4 * 2)), std::invalid_argument);
  CHECK_THROWS_AS(sum_rows_directly(rows, 8, bytes_of(2 * 3)), std::invalid_argument);
  const std::vector<ShardedFeature> behind{{0, 8, false, table.pieces_of}};
  CHECK_THROWS_AS(sum_rows_directly(batch.of(behind), 16, bytes_of(4 * 3)), std::invalid_argument);
  CHECK(memory == untouched);
}

TEST_CASE("threads that look rows up count all of them") {
  std::mt19937 random(9);
  CutTable table(50, 4, 4, {4}, random);
  JaggedBatch batch = draw(40, {50, 50}, false, random);
  const std::vector<ShardedFeature> features{{0, 0, false, table.pieces_of},
                                             {1, 16, false, table.pieces_of}};
  std::vector<int64_t> expected = batch.rows_to_read(features);
  constexpr int kThreads = 4, kTimes = 200;
  for (int64_t& rows : expected) rows = 1000 + (rows - 1000) * 2 * kThreads * kTimes;
  const DirectBatch shared = batch.of(features);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&shared, &batch] {
      std::vector<float> rows(4 * batch.ids.size()), sums(8 * batch.samples);
      for (int time = 0; time < kTimes; ++time) {
        copy_rows_directly(shared, 16, std::as_writable_bytes(std::span(rows)));
        sum_rows_directly(shared, 32, std::as_writable_bytes(std::span(sums)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(batch.rows_read == expected);
}
