#include "messages/ids/batch_ids.h"

namespace bls {

BatchIds::BatchIds(const Arrival& arrival, size_t features, std::span<const int> order)
    : arrived_(arrival, features, order) {
  const auto bags = features * static_cast<size_t>(arrived_.total_stride());
  const auto count = static_cast<size_t>(arrived_.total_values());
  lengths_ = std::make_shared<IdsMemory>(bags * arrived_.length_bytes());
  values_ = std::make_shared<IdsMemory>(count * arrived_.value_bytes());
  weights_ = std::make_shared<IdsMemory>(count * arrived_.weight_bytes());
  largest_ =
      arrived_.assemble(arrival, lengths_->data.get(), values_->data.get(), weights_->data.get());
  for (const int rank : order) batches_.push_back(arrived_.strides()[static_cast<size_t>(rank)]);
}

}  // namespace bls
