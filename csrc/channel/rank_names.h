#pragma once

#include <string>
#include <utility>
#include <vector>

namespace bls {

/// Names of the ranks of a group in messages to users: their global numbers, and those of the group
/// where the two differ.
class RankNames {
 public:
  RankNames() = default;
  /// `global_ranks` has the global number of each rank; an empty one means that they are the same.
  explicit RankNames(std::vector<int> global_ranks) : global_ranks_(std::move(global_ranks)) {
    bool differ = false;
    for (size_t i = 0; i < global_ranks_.size(); ++i) {
      differ = differ || global_ranks_[i] != static_cast<int>(i);
    }
    if (!differ) global_ranks_.clear();
  }

  std::string of(int rank) const {
    const std::string number = std::to_string(rank);
    if (rank < 0 || static_cast<size_t>(rank) >= global_ranks_.size()) return "rank " + number;
    const int global = global_ranks_[static_cast<size_t>(rank)];
    return "rank " + std::to_string(global) + " (" + number + " of its group)";
  }

 private:
  std::vector<int> global_ranks_;
};

}  // namespace bls
