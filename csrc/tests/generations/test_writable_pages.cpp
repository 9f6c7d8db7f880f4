#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "host/memory_file.h"
#include "lookup/direct/control_page.h"
#include "lookup/direct/writable_pages.h"

using namespace bls;

namespace {

constexpr size_t kBytes = 4096;
const MemoryPurpose kPurpose{"a test", "Free some"};

/// How a child ends that runs `act`, and exits with 0 if that returns true.
template <class Act>
int status_of_child(const Act& act) {
  const pid_t child = fork();
  if (child == 0) _exit(act() ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

}  // namespace

TEST_CASE("a forked child reads what its parent may write") {
  const Descriptor file = create_memory_file(kBytes, kPurpose);
  WritablePages pages(file.get(), kBytes, "a test");
  CHECK(pages.are_writable());
  pages.data()[0] = std::byte{7};
  CHECK(status_of_child([&] { return !pages.are_writable() && pages.data()[0] == std::byte{7}; }) ==
        0);
  CHECK(pages.are_writable());
  pages.data()[0] = std::byte{8};
  const int status = status_of_child([&] {
    std::signal(SIGSEGV, SIG_DFL);  // dies without a report
    *const_cast<volatile std::byte*>(pages.data()) = std::byte{9};
    return true;
  });
  CHECK(status != 0);
  CHECK(pages.data()[0] == std::byte{8});
}

TEST_CASE("a child may write to what it has mapped itself, and its own child may not") {
  const Descriptor file = create_memory_file(kBytes, kPurpose);
  const WritablePages of_parent(file.get(), kBytes, "a test");
  CHECK(status_of_child([&] {
          WritablePages pages(file.get(), kBytes, "a test");
          pages.data()[1] = std::byte{5};
          return pages.are_writable() &&
                 status_of_child([&] { return !pages.are_writable(); }) == 0;
        }) == 0);
  CHECK(of_parent.data()[1] == std::byte{5});
}

TEST_CASE("a forked child is refused when it takes an owner over") {
  ControlPage page = ControlPage::create(1, {});
  CHECK(status_of_child([&] {
          try {
            page.take_over(0, 0, 1);
          } catch (const std::invalid_argument& error) {
            return std::string(error.what()).find("was forked from") != std::string::npos;
          }
          return false;
        }) == 0);
  CHECK(page.process(0) == 0);
}
