#include "host/instruction_set.h"

#include <atomic>
#include <iterator>
#include <stdexcept>
#include <string>

#ifdef __x86_64__
#include "host/x86_features.h"
#endif

namespace bls {
namespace {

struct Named {
  InstructionSet set;
  std::string_view name;
};

// The best last.
constexpr Named kSets[] = {{InstructionSet::kPortable, "portable"},
                           {InstructionSet::kAvx2, "avx2"},
                           {InstructionSet::kAvx512, "avx512"}};

bool runs_here(InstructionSet set) {
  if (set == InstructionSet::kPortable) return true;
#ifdef __x86_64__
  const X86Features features = x86_features();
  return set == InstructionSet::kAvx2 ? features.avx2 : features.avx512;
#else
  return false;
#endif
}

InstructionSet best() {
  auto named = std::rbegin(kSets);
  while (!runs_here(named->set)) ++named;
  return named->set;
}

std::atomic<InstructionSet>& in_use() {
  static std::atomic<InstructionSet> set{best()};
  return set;
}

}  // namespace

InstructionSet instruction_set() { return in_use().load(std::memory_order_relaxed); }

std::vector<std::string_view> instruction_sets() {
  std::vector<std::string_view> names;
  for (const auto& [set, name] : kSets) {
    if (runs_here(set)) names.push_back(name);
  }
  return names;
}

void use_instruction_set(std::string_view name) {
  for (const Named& named : kSets) {
    if (named.name == name && runs_here(named.set)) return in_use().store(named.set);
  }
  throw std::invalid_argument("this processor has no instruction set " + std::string(name));
}

}  // namespace bls
