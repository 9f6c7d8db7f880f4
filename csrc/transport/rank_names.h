#pragma once

#include <string>
#include <utility>
#include <vector>

namespace bls {

/// Names of the ranks of a group in messages to users. Their owner is RankNames in Python, which
/// knows the global numbers.
class RankNames {
 public:
  RankNames() = default;
  /// `names` has the name of each rank; an empty one means that a rank is named by its number.
  explicit RankNames(std::vector<std::string> names) : names_(std::move(names)) {}

  std::string of(int rank) const {
    const auto index = static_cast<size_t>(rank);
    return rank < 0 || index >= names_.size() ? "rank " + std::to_string(rank) : names_[index];
  }

 private:
  std::vector<std::string> names_;
};

}  // namespace bls
