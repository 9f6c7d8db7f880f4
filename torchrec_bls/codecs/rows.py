"""Rows of floats in fewer bytes."""

from enum import IntEnum

import torch

from torchrec_bls import _native


class Codec(IntEnum):
    """The forms in which rows of float32 travel. The numbers are part of the wire format.

    `UINT8`, `UINT4` and `UINT2` quantize each row on a uniform grid between its least and greatest
    value, with a float32 scale and offset per row (Quantized Collectives, section 3.1). Some rows
    travel as they are: those with NaN, with a magnitude of at least 2^127 (infinities too), or with
    a range of at least 2^126. `FP16` and `BF16` round to even. In `FP16` values from 65,520 on
    become infinite.
    """

    FP32 = 0
    FP16 = 1
    BF16 = 2
    UINT8 = 3
    UINT4 = 4
    UINT2 = 5


def encode(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Encodes a matrix.

    Args:
        rows: float32 on CPU, [rows, columns], with contiguous rows. The rows may be apart, as the
            columns of one table in [batch, sum of dims] are.
        codec: codec to encode with.

    Returns:
        The message, uint8, [bytes].

    Raises:
        ValueError: `rows` is another kind of tensor.
    """
    out = _room(rows, codec)
    return out[: _native.encode_rows(codec, rows, out)].clone()


def decode(data: torch.Tensor, codec: Codec, out: torch.Tensor) -> torch.Tensor:
    """Decodes what `encode` returned.

    Args:
        data: uint8 on CPU, [bytes], contiguous.
        codec: codec that it was encoded with.
        out: float32 on CPU in the shape of what was encoded, [rows, columns], with contiguous rows.

    Returns:
        `out`.

    Raises:
        ValueError: a tensor is of another kind.
        ProtocolError: `data` cannot be rows of this shape.
    """
    _check_plain(out)
    _native.decode_rows(codec, data, out)
    return out


def round_trip(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Encodes and decodes `rows`; see `encode`."""
    out, data = torch.empty(rows.shape), _room(rows, codec)
    size = _native.encode_rows(codec, rows, data)
    _native.decode_rows(codec, data[:size], out)
    return out


def _room(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns memory for the longest message of `rows`."""
    _check_plain(rows)
    return torch.empty(_native.max_encoded_bytes(codec, *rows.shape), dtype=torch.uint8)


def _check_plain(rows: torch.Tensor) -> None:
    """Raises ValueError for rows whose shape or memory does not show what they are."""
    if rows.dim() != 2:
        raise ValueError(f"rows have the shape {list(rows.shape)}, but must be a matrix")
    if rows.is_neg():
        raise ValueError("rows are a view that negates what is in its memory: use resolve_neg()")
