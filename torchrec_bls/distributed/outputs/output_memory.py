"""Memory of outputs. Large outputs get pages that earlier outputs have given back."""

from collections.abc import Callable
from math import prod

import torch

from torchrec_bls import _native

#: Returns an uninitialized tensor of a shape and dtype.
EmptyOutput = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

# malloc does not give smaller ones back to the system.
_POOLED_BYTES = 1 << 20
# One for this process, whose modules look up one after the other.
_POOL = _native.PagePool(unused=4)


def empty_output(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized tensor.

    The memory of a large tensor is used again when nobody has the tensor, or a view of it, any
    more. Its storage cannot be resized.
    """
    size = prod(shape) * dtype.itemsize
    if size < _POOLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_POOL.take(size), dtype=dtype).view(shape)
