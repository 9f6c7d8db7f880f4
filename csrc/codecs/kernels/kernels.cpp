#include "codecs/kernels/kernels.h"

#include <atomic>
#include <iterator>
#include <stdexcept>
#include <string>

namespace bls {
namespace {

// The best last.
constexpr const Kernels* kKernels[] = {
    &kPortableKernels,
#ifdef __x86_64__
    &kAvx2Kernels,
    &kAvx512Kernels,
#endif
};

const Kernels* best() {
  auto kernels = std::rbegin(kKernels);
  while (!(*kernels)->run_here()) ++kernels;
  return *kernels;
}

std::atomic<const Kernels*>& in_use() {
  static std::atomic<const Kernels*> kernels{best()};
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *in_use().load(std::memory_order_relaxed); }

std::vector<std::string_view> instruction_sets() {
  std::vector<std::string_view> names;
  for (const Kernels* kernels : kKernels) {
    if (kernels->run_here()) names.push_back(kernels->name);
  }
  return names;
}

void use_instruction_set(std::string_view name) {
  for (const Kernels* kernels : kKernels) {
    if (kernels->name == name && kernels->run_here()) return in_use().store(kernels);
  }
  throw std::invalid_argument("this processor has no instruction set " + std::string(name));
}

}  // namespace bls
