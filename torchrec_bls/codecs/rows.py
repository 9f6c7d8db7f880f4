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
    matrix = _matrix(rows)
    out = torch.empty(_native.max_encoded_bytes(codec, *rows.shape), dtype=torch.uint8)
    return out[: _native.encode_rows(codec, matrix, out.data_ptr())].clone()


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
    if data.dtype != torch.uint8 or data.device.type != "cpu" or not data.is_contiguous():
        raise ValueError(
            f"data is {data.dtype} on {data.device} with strides {data.stride()}, but must be "
            "contiguous uint8 on cpu"
        )
    _native.decode_rows(codec, data.data_ptr(), data.numel(), _matrix(out))
    return out


def round_trip(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Encodes and decodes `rows`; see `encode`."""
    matrix, out = _matrix(rows), torch.empty(rows.shape)
    data = torch.empty(_native.max_encoded_bytes(codec, *rows.shape), dtype=torch.uint8)
    size = _native.encode_rows(codec, matrix, data.data_ptr())
    _native.decode_rows(codec, data.data_ptr(), size, _matrix(out))
    return out


def _matrix(rows: torch.Tensor) -> tuple[int, int, int, int]:
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or rows.dim() != 2:
        raise ValueError(
            f"rows are {rows.dtype} on {rows.device} of shape {tuple(rows.shape)}, but must be a "
            "float32 matrix on cpu"
        )
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ValueError(f"rows have strides {rows.stride()}, but each must be contiguous")
    if rows.is_neg():
        raise ValueError("rows are a view that negates what is in its memory: use resolve_neg()")
    return rows.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0)
