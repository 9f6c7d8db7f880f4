"""The checks of quantized modules' batches, beyond those of all sharded modules."""

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck

NO_GRADIENTS = "autograd is on, but quantized tables have no gradients: use torch.no_grad()"


def is_weighted(module: Any) -> bool:
    """Returns whether the ids of TorchRec's quantized module have weights."""
    return hasattr(module, "is_weighted") and bool(module.is_weighted())


def needs_ids(module: Any) -> bool:
    """Returns whether the output of TorchRec's quantized module has the ids."""
    return hasattr(module, "need_indices") and bool(module.need_indices())


def looked_up(module: Any, features: KeyedJaggedTensor, check: InputCheck) -> Any:
    """Returns the embeddings of a batch from TorchRec's quantized module.

    Args:
        module: module. It may remember the order of keys of its first batch.
        features: the batch. One without samples may be of another order than all later ones.
        check: input check of the module.
    """
    embeddings = module(features)
    if features.keys() != check.keys:
        module._features_order = None
    return embeddings


class QuantInputCheck(InputCheck):
    """Accepts batches that FBGEMM's quantized lookups accept, with weights in float32."""

    def _checked(self, features: object, gpu: Gpu | None) -> CheckedBatch:
        if self.is_weighted and isinstance(features, KeyedJaggedTensor):
            weights = features.weights_or_none()
            if weights is None or weights.dtype != torch.float32:
                found = "no weights" if weights is None else f"weights of {weights.dtype}"
                raise ValueError(
                    f"the KeyedJaggedTensor has {found}, but FBGEMM's weighted quantized lookups "
                    "take float32"
                )
        return super()._checked(features, gpu)


class FullQuantInputCheck(QuantInputCheck):
    """Accepts the same, and gives each sample its ids where the batch has a size per key."""

    def _checked(self, features: object, gpu: Gpu | None) -> CheckedBatch:
        # Rows travel once for each distinct id, however many samples have it.
        return super()._checked(features, gpu).in_full(self._rows_by_feature)
