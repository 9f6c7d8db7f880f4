#pragma once

#include <cstddef>
#include <optional>

#include "bindings/tensors/tensor_argument.h"
#include "messages/ids/jagged_ids.h"

namespace bls {

/// The tensors of a KeyedJaggedTensor: int32 or int64 `lengths`, [features x stride], int32 or
/// int64 `values`, and one float32 weight of each, or none. Throws as `items_of` does, and
/// py::value_error for tensors of other sizes.
JaggedIds jagged_ids(const Tensor& lengths, const Tensor& values,
                     const std::optional<Tensor>& weights, size_t features, size_t stride);

/// The same where each id is looked up for itself.
JaggedIds ids_alone(const Tensor& values, size_t features);

}  // namespace bls
