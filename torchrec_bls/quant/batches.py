"""What quantized modules ask of a batch beside what all sharded modules do."""

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck


def is_weighted(module: Any) -> bool:
    """Whether the ids of TorchRec's quantized module have weights."""
    return hasattr(module, "is_weighted") and bool(module.is_weighted())


def checked(check: InputCheck, features: object) -> CheckedBatch:
    """Returns a batch that FBGEMM's quantized lookups take.

    Args:
        check: of the module.
        features: KeyedJaggedTensor on the CPU; its weights, if the module has any, are float32.

    Raises:
        ValueError: it does not fit the module.
    """
    # Before the check, which takes the first batch's dtypes for those of all.
    if check.is_weighted and isinstance(features, KeyedJaggedTensor):
        weights = features.weights_or_none()
        if weights is None or weights.dtype != torch.float32:
            found = "no weights" if weights is None else f"weights of {weights.dtype}"
            raise ValueError(
                f"the KeyedJaggedTensor has {found}, but FBGEMM's weighted quantized lookups "
                "take float32"
            )
    batch = check.check(features)
    if batch.varying is not None:
        raise ValueError(
            "the KeyedJaggedTensor has a batch size per key, which quantized modules can't "
            "look up: give all keys the same"
        )
    return batch
