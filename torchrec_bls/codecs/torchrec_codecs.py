"""Codecs for TorchRec's own sharders, over any backend that moves bytes.

TorchRec needs the size of a message before the message is made. So a row cannot travel as it is:
one with NaN or an infinity arrives as NaN. The bounded-lag sharders have no such limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchrec_bls import _native
from torchrec_bls._versions import check_packages
from torchrec_bls.codecs.rows import Codec, decode, encode

if TYPE_CHECKING:
    from torchrec.distributed.types import QuantizedCommCodecs

__all__ = ["Codec", "codecs_registry"]

_ROW_WISE = (Codec.UINT8, Codec.UINT4, Codec.UINT2)


class RowCodec:
    """TorchRec's QuantizedCommCodec with codecs of rows.

    Args:
        codec: codec to encode with.
        row_dim: number of values that share a scale. It has to divide the columns of every table,
            or of its shards if they are cut by columns.

    Raises:
        ValueError: `row_dim` is not positive, or the codec's sizes depend on the values.
    """

    quantized_dtype = torch.uint8

    def __init__(self, codec: Codec, row_dim: int) -> None:
        if not isinstance(codec, Codec):
            raise ValueError(
                f"the codec is {codec!r}, but TorchRec needs the size of a message before it is "
                "encoded: choose a Codec, or the bounded-lag sharders for an ErrorBound"
            )
        if row_dim < 1:
            raise ValueError(f"row_dim is {row_dim}, but must be positive")
        self._codec = codec
        self._row_dim = row_dim
        self._row_bytes = _native.usual_encoded_bytes(codec, 1, row_dim)

    def encode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Returns uint8, [`calc_quantized_size`], for float32 values of any shape."""
        rows = input_tensor.detach().reshape(-1, self._row_dim)
        # After these bytes come the values of rows that are not finite.
        return encode(rows, self._codec)[: len(rows) * self._row_bytes]

    def decode(self, input_grad: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Returns the values, flat."""
        data = input_grad.contiguous()
        out = torch.empty(data.numel() // self._row_bytes, self._row_dim)
        return decode(self._with_escaped(data), self._codec, out).view(-1)

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        """Returns how many bytes `input_len` values take.

        Raises:
            ValueError: the values are no whole rows.
        """
        if input_len % self._row_dim:
            raise ValueError(
                f"{input_len} values are no whole rows of {self._row_dim}: row_dim has to divide "
                "the columns of every table, or of its shards if they are cut by columns"
            )
        return input_len // self._row_dim * self._row_bytes

    def create_context(self) -> None:
        """Returns None: nothing goes from encoder to decoder beside the message."""

    def padded_size(
        self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: None
    ) -> tuple[int, int]:
        """Returns the columns of the input, and that no columns are added."""
        return input_tensor.shape[-1], 0

    def _with_escaped(self, data: torch.Tensor) -> torch.Tensor:
        if self._codec not in _ROW_WISE:
            return data
        scales = data.view(-1, self._row_bytes)[:, :4].contiguous().view(torch.float32)
        escaped = int(scales.isnan().sum())
        if escaped == 0:
            return data
        values = torch.full((escaped * self._row_dim,), torch.nan)
        return torch.cat([data, values.view(torch.uint8)])


def codecs_registry(
    forward: Codec, backward: Codec, row_dim: int
) -> dict[str, QuantizedCommCodecs]:
    """Returns the argument `qcomm_codecs_registry` of TorchRec's sharders.

    It covers the all-to-alls of embeddings: table-wise and column-wise sharding, and row-wise
    sharding of EmbeddingCollections. The reduce-scatter of row-wise EmbeddingBagCollections stays
    float32.

    Args:
        forward: codec of embeddings.
        backward: codec of their gradients.
        row_dim: see `RowCodec`.

    Raises:
        VersionError: torch, fbgemm and torchrec don't match, or one is missing.
        ValueError: see `RowCodec`.
    """
    check_packages()
    from torchrec.distributed.types import CommOp, QuantizedCommCodecs

    codecs = QuantizedCommCodecs(
        forward=RowCodec(forward, row_dim),
        backward=RowCodec(backward, row_dim),
    )
    # Reduce-scatters add up what they move, and codes cannot be added.
    ops = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
    return {op.name: codecs for op in ops}
