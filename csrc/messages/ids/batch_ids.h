#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "channel/message.h"
#include "messages/ids/arrived_ids.h"

namespace bls {

/// Uninitialized memory.
struct IdsMemory {
  explicit IdsMemory(size_t size)
      : data(std::make_unique_for_overwrite<std::byte[]>(size)), bytes(size) {}

  std::unique_ptr<std::byte[]> data;
  size_t bytes;
};

/// The ids of one batch that all ranks sent for this rank's features, put together in memory of
/// their own: their messages can be released.
class BatchIds {
 public:
  /// Throws what ArrivedIds does.
  BatchIds(const Arrival& arrival, size_t features, std::span<const int> order);

  const ArrivedIds& arrived() const { return arrived_; }
  /// Batch sizes in the order of `arrived`.
  std::span<const int64_t> batches() const { return batches_; }
  /// [features x samples of all ranks], [ids], and likewise; as ArrivedIds::assemble writes them.
  const std::shared_ptr<IdsMemory>& lengths() const { return lengths_; }
  const std::shared_ptr<IdsMemory>& values() const { return values_; }
  const std::shared_ptr<IdsMemory>& weights() const { return weights_; }

  /// The largest id of each feature, as ArrivedIds::assemble returns it; empty once others may have
  /// changed the ids.
  std::span<const int64_t> largest() const { return largest_; }
  /// The ids, for others to read and to change.
  const std::shared_ptr<IdsMemory>& expose_values() {
    largest_.clear();
    return values_;
  }

 private:
  ArrivedIds arrived_;
  std::vector<int64_t> batches_;
  std::shared_ptr<IdsMemory> lengths_;
  std::shared_ptr<IdsMemory> values_;
  std::shared_ptr<IdsMemory> weights_;
  std::vector<int64_t> largest_;
};

}  // namespace bls
