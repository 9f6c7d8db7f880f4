"""The place of each rank's part in the tensors of an all-to-all."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from torchrec_bls import _native


def sent_part(tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns `tensor`, or a contiguous copy whose memory holds its values and is none of the
    outputs'. A view that negates or conjugates only when it is read gets one, too."""
    _check_on_cpu(tensor, "input")
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    begin = plain.data_ptr()
    end = begin + plain.nbytes
    for output in outputs:
        at = output.data_ptr()
        if at < end and begin < at + output.nbytes:
            return plain.clone()
    return plain


def check_outputs(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError for an output that is not one run of bytes with its values, or that shares
    memory with another one."""
    for tensor in tensors:
        _check_on_cpu(tensor, "output")
        if not tensor.is_contiguous():
            raise ValueError(
                f"output of shape {tuple(tensor.shape)} has strides {tensor.stride()}, but must be "
                "contiguous: receive into a contiguous tensor, and copy from there"
            )
        if tensor.is_neg() or tensor.is_conj():
            raise ValueError(
                f"output of shape {tuple(tensor.shape)} is a view that negates or conjugates what "
                "is in its memory: receive into a tensor of its own, and copy from there"
            )
    places = sorted((each.data_ptr(), each.nbytes) for each in tensors if each.nbytes)
    for (at, size), (following, _) in pairwise(places):
        if following < at + size:
            raise ValueError(
                f"{len(tensors)} outputs share memory, so that what one rank sends would overwrite "
                "what another one sends: give each rank an output of its own"
            )


def check_reduced(tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that has several elements in one place, as an expanded one
    has: it has no room for the result."""
    if tensor.is_contiguous():
        return
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}, so that "
                "elements share memory and all_reduce cannot write its result: reduce a clone() of "
                "it. No rank has reduced anything yet, and this one may call again"
            )
        reach += (size - 1) * stride


def split(
    tensor: torch.Tensor, sizes: Sequence[int], world_size: int, name: str
) -> _native.Buffers:
    """Returns the memory of each rank's rows in a contiguous tensor.

    Args:
        tensor: tensor with at least one dimension.
        sizes: number of rows of each rank; empty where all have equally many.
        world_size: number of ranks.
        name: "input" or "output", for messages.

    Raises:
        ValueError: the sizes do not fit the tensor or the ranks.
    """
    if tensor.dim() == 0:
        raise ValueError(f"{name} is a scalar, but its rows are what is split: give it a dimension")
    rows = tensor.size(0)
    row_bytes = tensor.nbytes // rows if rows else 0
    if not sizes:
        if rows % world_size:
            raise ValueError(
                f"{name} has {rows} rows, which do not divide equally among {world_size} ranks: "
                f"give {name}_split_sizes"
            )
        return _native.Buffers.split(tensor, [rows // world_size * row_bytes] * world_size)
    if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{name}_split_sizes are {list(sizes)}, but have to be {world_size} numbers of rows, "
            f"one a rank, that sum to {name}'s {rows}"
        )
    return _native.Buffers.split(tensor, [size * row_bytes for size in sizes])


def copy_to(receive: _native.Buffers) -> Callable[[_native.Arrival], None]:
    """Returns a function that copies the message of each rank s to `receive[s]`."""

    def copy(arrival: _native.Arrival) -> None:
        _native.collect_buffers(arrival, receive)

    return copy


def _check_on_cpu(tensor: torch.Tensor, name: str) -> None:
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}, but backend 'bls' is for CPU tensors")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}, but must be strided: use to_dense()")
