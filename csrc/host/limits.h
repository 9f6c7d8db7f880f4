#pragma once

#include <cstdint>
#include <filesystem>

namespace bls {

/// CPUs' worth of time that this process may use, at least a part of one: those that its affinity
/// names, or less where a control group has a quota. The quota is read once per process.
double usable_cpus();

/// The least quota of this process's control groups and those around them, versions 1 and 2, in
/// CPUs; infinity where there is none. `root` is that of the file system.
double cpu_quota(const std::filesystem::path& root = "/");

/// Bytes that may still be taken before memory runs out: the host's, or what a control group of
/// this process has left. Not exact, and not less than the truth, where it is `wanted` or more. The
/// largest number where nothing is known.
uint64_t memory_left(uint64_t wanted, const std::filesystem::path& root = "/");

}  // namespace bls
