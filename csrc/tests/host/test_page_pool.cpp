#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "host/page_pool.h"

namespace bls {
namespace {

constexpr size_t kMega = size_t{1} << 20;

TEST_CASE("memory of who is done is used again") {
  const auto pool = PagePool::make(2);
  std::byte* first = nullptr;
  {
    const auto block = pool->take(3 * kMega);
    CHECK(block.bytes() == 3 * kMega);
    CHECK(reinterpret_cast<uintptr_t>(block.data()) % (2 * kMega) == 0);
    std::memset(block.data(), 1, block.bytes());
    first = block.data();
  }
  CHECK(pool->take(4 * kMega).data() == first);  // 3 MiB took two pages
  const auto block = pool->take(3 * kMega);
  const auto other = pool->take(3 * kMega);
  CHECK(block.data() == first);
  CHECK(other.data() != first);
}

TEST_CASE("blocks that are much too large stay for larger requests, the smallest go first") {
  const auto pool = PagePool::make(2);
  const std::byte* data[3];
  {
    std::vector<PagePool::Block> blocks;
    for (size_t i = 0; i < 3; ++i) {
      blocks.push_back(pool->take((16 + 2 * i) * kMega));
      data[i] = blocks.back().data();
    }
    CHECK(pool->take(0).bytes() == 0);
  }
  const auto small = pool->take(2 * kMega);
  const auto smallest = pool->take(16 * kMega);
  const auto largest = pool->take(20 * kMega);
  CHECK(small.data() != data[1]);
  CHECK(small.data() != data[2]);
  CHECK(smallest.data() == data[1]);
  CHECK(largest.data() == data[2]);
}

TEST_CASE("a block outlives its pool") {
  auto pool = PagePool::make(2);
  auto taken = pool->take(kMega);
  const auto block = std::move(taken);
  pool.reset();
  std::memset(block.data(), 1, block.bytes());
  CHECK(block.data()[kMega - 1] == std::byte{1});
}

TEST_CASE("more than there is") {
  const auto pool = PagePool::make(2);
  CHECK_THROWS_AS(pool->take(SIZE_MAX), std::bad_alloc);
  CHECK_THROWS_AS(pool->take(size_t{1} << 60), std::bad_alloc);
}

TEST_CASE("threads share a pool") {
  const auto pool = PagePool::make(2);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 200; ++i) {
        const auto block = pool->take(64 + static_cast<size_t>(i));
        std::memset(block.data(), thread, block.bytes());
        std::this_thread::yield();
        for (size_t at = 0; at < block.bytes(); ++at) {
          wrong[thread] += block.data()[at] != std::byte(thread);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4, 0));
}

}  // namespace
}  // namespace bls
