#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <thread>

#include "host/memory_file.h"

using namespace bls;

TEST_CASE("contents are sealed as soon as nobody holds a page") {
  constexpr size_t kPage = 4096;
  const MemoryPurpose purpose{"a test", "Free some"};
  const Descriptor file = create_memory_file(kPage, purpose);
  void* const mapped = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, file.get(), 0);
  REQUIRE(mapped != MAP_FAILED);
  // A pipe holds the page until it is read, as the kernel does while it moves one.
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  const Descriptor out(ends[0]), in(ends[1]);
  const iovec part{mapped, kPage};
  REQUIRE(vmsplice(in.get(), &part, 1, 0) == static_cast<ssize_t>(kPage));
  REQUIRE(munmap(mapped, kPage) == 0);
  REQUIRE(fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
  REQUIRE(errno == EBUSY);
  std::thread reader([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    std::array<char, kPage> bytes;
    CHECK(read(out.get(), bytes.data(), kPage) == static_cast<ssize_t>(kPage));
  });
  seal_memory_file(file.get(), Seal::kContents, purpose);
  CHECK(is_sealed(file.get(), kPage, Seal::kContents));
  CHECK(is_sealed(file.get(), kPage, Seal::kLaterWriters));
  reader.join();
}
