#include "bindings/tensors/jagged_argument.h"

namespace bls {

JaggedIds ids_alone(const Tensor& values, size_t features) {
  const TensorItems of_values = items_of(values, "values", kInt32 | kInt64);
  JaggedIds ids;
  ids.values = of_values.data;
  ids.value_bytes = of_values.item_bytes;
  ids.features = features;
  ids.count = of_values.count;
  return ids;
}

JaggedIds jagged_ids(const Tensor& lengths, const Tensor& values,
                     const std::optional<Tensor>& weights, size_t features, size_t stride) {
  JaggedIds ids = ids_alone(values, features);
  const TensorItems of_lengths = items_of(lengths, "lengths", kInt32 | kInt64);
  check_count("lengths", of_lengths.count, features * stride, "items");
  ids.lengths = of_lengths.data;
  ids.length_bytes = of_lengths.item_bytes;
  ids.stride = stride;
  if (weights) {
    const TensorItems of_weights = items_of(*weights, "weights", kFloat32);
    check_count("weights", of_weights.count, ids.count, "items");
    ids.weights = of_weights.data;
    ids.weight_bytes = of_weights.item_bytes;
  }
  return ids;
}

}  // namespace bls
