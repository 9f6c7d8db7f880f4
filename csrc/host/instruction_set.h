#pragma once

#include <string_view>
#include <vector>

namespace bls {

/// What kernels are compiled for. All have the same results, bit for bit.
enum class InstructionSet { kPortable, kAvx2, kAvx512 };

/// The best of this processor, unless another was chosen.
InstructionSet instruction_set();

/// Names of those that run here, the best last.
std::vector<std::string_view> instruction_sets();

/// Chooses one of `instruction_sets` for all later calls, for tests.
///
/// Throws std::invalid_argument if it does not run here.
void use_instruction_set(std::string_view name);

}  // namespace bls
