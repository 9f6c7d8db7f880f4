"""Dense weights in a segment, after its tables, for processes that only read the tables."""

import io
import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torchrec_bls import _native
from torchrec_bls.records import Whole, decode

# Contiguous tensors of a segment, and their places in bytes.
Parts = Iterable[tuple[torch.Tensor, int]]

# Name, dtype, shape and place of each tensor.
_Directory = list[tuple[str, str, list[Whole], Whole]]
_MAGIC = b"tbbldw01"
# A magic number, and the bytes of the directory that follows.
_HEAD = struct.Struct("<8sQ")
_LONGEST_DIRECTORY = 64 << 20
# Bytes of a cache line; no two tensors share one.
_ALIGNMENT = 64
# Name of one more tensor, the bytes of all entries that are none. No entry has this name.
_OTHERS = ""


def is_plain(name: str, value: Any) -> bool:
    """Returns whether an entry of a state dict is a tensor whose bytes are all there is to it.

    Others are what modules make of their state: packed weights, and anything as extra state.
    """
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and not value.is_quantized
        and not name.endswith("_extra_state")
    )


def encoded(others: Mapping[str, Any]) -> bytes:
    """Returns the entries of a state that are no plain tensors, as bytes.

    Raises:
        ValueError: an entry can't be read without running code of whoever wrote it.
    """
    try:
        return _written(others)
    except Exception:
        for name, value in others.items():
            try:
                _written({name: value})
            except Exception as error:
                raise ValueError(
                    f"'{name}' is a {type(value).__name__} that can't be handed to other "
                    "processes: only what torch.load(weights_only=True) reads can be. Make it of "
                    f"tensors, numbers, text, lists and dicts ({error})"
                ) from error
        raise


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a state that shares no memory with it.

    Raises:
        ValueError: see `encoded`.
    """
    others = {name: value for name, value in state.items() if not is_plain(name, value)}
    made = _read(encoded(others)) if others else {}
    return {
        name: made[name] if name in made else value.detach().clone()
        for name, value in state.items()
    }


def behind(tables_end: int) -> int:
    """Returns where dense weights begin in a segment, in bytes."""
    return -(-tables_end // _ALIGNMENT) * _ALIGNMENT


def dense_parts(dense: Mapping[str, Any], tables_end: int) -> tuple[Parts, int]:
    """Returns the dense weights as parts of a segment, and the byte where they end.

    Args:
        dense: weights by name in the state dict, of any shapes and dtypes, and what modules make of
            their state.
        tables_end: end of the tables in the same segment, in bytes.

    Raises:
        ValueError: see `encoded`.
    """
    others = {name: value for name, value in dense.items() if not is_plain(name, value)}
    dense = {name: value for name, value in dense.items() if name not in others}
    if others:
        dense |= {_OTHERS: torch.frombuffer(bytearray(encoded(others)), dtype=torch.uint8)}
    begin, size = behind(tables_end), 0
    tensors: list[tuple[torch.Tensor, int]] = []
    directory = []
    for name, tensor in dense.items():
        tensors.append((tensor.detach().cpu().contiguous(), size))
        directory.append((name, _name_of(tensor.dtype), list(tensor.shape), size))
        size += behind(tensor.nbytes)
    text = json.dumps(directory).encode()
    head = bytearray(_HEAD.pack(_MAGIC, len(text)) + text)
    first = behind(begin + len(head))
    parts = [(torch.frombuffer(head, dtype=torch.uint8), begin)]
    return [*parts, *((tensor, first + at) for tensor, at in tensors)], first + size


def dense_weights(segment: _native.TableSegment, tables_end: int) -> dict[str, Any] | None:
    """Returns the dense weights in a segment, by name; None if there are none.

    Plain tensors are views of the segment. If this process writes to them, only it sees the change.

    Raises:
        ValueError: the bytes after the tables are something else.
    """
    if segment.size == tables_end:
        return None
    pages = memoryview(_native.PrivatePages(segment))  # type: ignore[arg-type]
    begin, size = behind(tables_end), segment.size
    if begin + _HEAD.size > size:
        raise ValueError("too short for dense weights")
    magic, length = _HEAD.unpack_from(pages, begin)
    text = begin + _HEAD.size
    if magic != _MAGIC or length > min(size - text, _LONGEST_DIRECTORY):
        raise ValueError("no dense weights")
    data = bytes(pages[text : text + length])
    directory = decode(data, _Directory, "the directory", "it is not one of dense weights")
    first = end = behind(text + length)
    dense: dict[str, Any] = {}
    for name, kind, shape, at in directory:
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"'{name}' is of {kind}, which is no dtype")
        tensor_bytes = math.prod(shape) * dtype.itemsize
        if at % _ALIGNMENT or first + at + tensor_bytes > size:
            raise ValueError(f"'{name}' has {tensor_bytes} bytes at {at}, which are not there")
        part = pages[first + at : first + at + tensor_bytes]
        try:
            dense[name] = _tensor_of(part).view(dtype).view(shape)
        except (RuntimeError, OverflowError) as error:
            raise ValueError(f"'{name}' can't be {kind} of the shape {shape}: {error}") from error
        end = first + behind(at + tensor_bytes)
    if end != size:
        raise ValueError(f"dense weights end at byte {end} of {size}")
    if _OTHERS in dense:
        dense |= _others_in(dense.pop(_OTHERS))
    return dense


def _tensor_of(part: memoryview) -> torch.Tensor:
    # torch refuses to make one of no bytes.
    return torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)


def _others_in(data: torch.Tensor) -> dict[str, Any]:
    try:
        others = _read(data.contiguous().numpy().tobytes())
    except Exception as error:  # whatever torch makes of such bytes
        raise ValueError(f"entries that are no tensors can't be read: {error}") from error
    if not isinstance(others, dict) or not all(isinstance(name, str) for name in others):
        raise ValueError("entries that are no tensors have no names")
    return others


def _written(others: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(others), buffer)
    _read(buffer.getvalue())
    return buffer.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
