"""Lookups of a quantized module that a GPU does, in the places of FBGEMM's."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import rounded_row_size_in_bytes
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS

from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.reader import GpuReader
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.gpu.strips import WORD_BYTES, Strip
from torchrec_bls.quant.stored_tables import StoredTable

_OUTPUTS = (torch.float32, torch.float16)


class GpuLookup:
    """One of a module's lookups in one generation. TorchRec's module calls it with ids of the host,
    as it does FBGEMM's, and the output is born on the GPU. The host waits for nothing.

    Args:
        lookup: FBGEMM's lookup.
        gpu: the GPU.
        readers: reads of the lookup's tables, see `readers_of`.
        tables: tables of the generation.
    """

    def __init__(
        self, lookup: Any, gpu: Gpu, readers: Sequence[GpuReader], tables: RegisteredTables
    ) -> None:
        self._is_pooled = lookup.pooling_mode != PoolingMode.NONE
        self._dtype = SparseType.from_int(lookup.output_dtype).as_dtype()
        self._features = len(lookup.feature_table_map)
        self._columns = _columns_of(lookup)
        self._gpu = gpu
        self._readers = list(readers)
        self._tables = tables

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output of a batch, on the GPU.

        Args:
            indices: checked ids, feature by feature, int32 or int64 [ids].
            offsets: where bags begin, and the end, int32 or int64 [features x samples + 1].
            per_sample_weights: weight of each id, float32 [ids], if there are some.

        Returns:
            Sums or means, [samples, columns]; or rows, [ids, columns of a row].
        """
        samples = (len(offsets) - 1) // self._features
        ids = self._gpu.copy_of(indices)
        if not self._is_pooled:
            [reader] = self._readers
            keys = torch.arange(self._features + 1) * samples
            begins = self._gpu.copy_of(offsets[keys].long())
            out = self._empty(len(indices), self._columns[0])
            reader.decode_rows(self._tables, ids, begins, out)
            return out
        offsets = self._gpu.copy_of(offsets)
        weights = None if per_sample_weights is None else self._gpu.copy_of(per_sample_weights)
        out = self._empty(samples, sum(self._columns))
        for reader in self._readers:
            reader.sum_rows(self._tables, ids, offsets, weights, out)
        return out

    __call__ = forward

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=self._dtype, device=self._gpu.device)


def readers_of(
    lookup: Any, tables: Sequence[StoredTable], gpu: Gpu, registered: RegisteredTables
) -> list[GpuReader]:
    """Returns the reads of a lookup's tables in all generations, those of each type of rows.

    Args:
        lookup: FBGEMM's lookup.
        tables: its tables.
        gpu: the GPU.
        registered: tables of any generation.
    """
    means = lookup.pooling_mode == PoolingMode.MEAN
    first_columns = [0, *accumulate(_columns_of(lookup))]
    by_bits: dict[int, list[list[Strip]]] = {}
    for key, number in enumerate(lookup.feature_table_map):
        table = tables[number]
        strip = Strip(
            key,
            0 if lookup.pooling_mode == PoolingMode.NONE else first_columns[key],
            table.columns,
            table.row_bytes,
            table.rows,
            table.rows,
            means,
            [table.begin],
        )
        by_bits.setdefault(DATA_TYPE_NUM_BITS[table.data_type], []).append([strip])
    return [GpuReader(gpu, registered, strips, bits) for bits, strips in by_bits.items()]


def why_not_by_gpu(module: Any) -> str:
    """Returns why a GPU can't do the lookups of a quantized module; empty if it can."""
    for lookup in module._emb_modules:
        dtype = SparseType.from_int(lookup.output_dtype).as_dtype()
        if dtype not in _OUTPUTS:
            return (
                f"its output is {dtype}, and GPUs write float32 or float16: quantize it with "
                "output_dtype=torch.float, or shard with device=torch.device('cpu')"
            )
        for name, _, dim, weights_type, _ in lookup.embedding_specs:
            size = rounded_row_size_in_bytes(
                dim, weights_type, lookup.row_alignment, lookup.scale_bias_size_in_bytes
            )
            if size % WORD_BYTES:
                return (
                    f"rows of table '{name}' take {size} bytes, and GPUs read whole words of "
                    f"{WORD_BYTES}: quantize it with a row_alignment of 16"
                )
    return ""


def _columns_of(lookup: Any) -> list[int]:
    """Returns the number of columns of each feature in an output."""
    dims = [dim for _, _, dim, _, _ in lookup.embedding_specs]
    return [dims[number] for number in lookup.feature_table_map]
