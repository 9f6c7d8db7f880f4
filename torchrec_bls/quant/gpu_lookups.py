"""Lookups of a quantized module by a GPU: in the places of FBGEMM's, and of batches on the GPU."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import rounded_row_size_in_bytes
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_bls.direct.gpu.capture import copied
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.reader import GpuReader, Launch
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.gpu.strips import WORD_BYTES, Strip
from torchrec_bls.direct.reads.tables_view import offsets_of
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.quant.batches import is_weighted, needs_ids
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


class GpuBatches:
    """Looks batches up that are on the GPU. TorchRec's module can't: between batch and lookups it
    calls FBGEMM, whose build for CPUs knows no GPU, and asks the host for numbers of ids.

    Args:
        module: TorchRec's module, for the form of its output.
        lookups: FBGEMM's lookups in it.
        configs: configs of the tables of each.
        by_lookup: tables of each.
        gpu: the GPU.
    """

    def __init__(
        self,
        module: Any,
        lookups: Sequence[Any],
        configs: Sequence[Sequence[Any]],
        by_lookup: Sequence[Sequence[StoredTable]],
        gpu: Gpu,
    ) -> None:
        self._is_weighted, self._with_ids = is_weighted(module), needs_ids(module)
        self._lookups, self._configs, self._by_lookup = lookups, configs, by_lookup
        names = [get_embedding_names_by_table(list(tables)) for tables in configs]
        self._names = [list(chain(*of_lookup)) for of_lookup in names]
        in_order = list(chain(*configs))
        self._pooled_names = list(chain(*get_embedding_names_by_table(in_order)))
        self._dims = [each.embedding_dim for each in in_order for _ in each.feature_names]
        self._gpu = gpu
        self._dtype = SparseType.from_int(lookups[0].output_dtype).as_dtype()
        # Of the keys of the last batch.
        self._last: tuple[list[str], list[list[GpuReader]]] = [], []

    def pooled(
        self, batch: CheckedBatch, tables: RegisteredTables
    ) -> tuple[KeyedTensor, list[Launch]]:
        """Returns the output of an EmbeddingBagCollection, and its launches.

        Args:
            batch: batch on the GPU.
            tables: tables of a generation.
        """
        features = batch.features
        out = self._empty(features.stride(), sum(self._dims))
        offsets = offsets_of(features.lengths())
        ids = features.values()
        weights = features.weights() if self._is_weighted else None
        launches = [
            reader.sum_rows(tables, ids, offsets, weights, out)
            for readers in self._readers(features.keys(), tables)
            for reader in readers
        ]
        return KeyedTensor(self._pooled_names, self._dims, out), launches

    def sequences(
        self, batch: CheckedBatch, tables: RegisteredTables
    ) -> tuple[dict[str, JaggedTensor], list[Launch]]:
        """Returns the output of an EmbeddingCollection, and its launches.

        Args:
            batch: batch on the GPU, counted.
            tables: tables of a generation.
        """
        features, counts = batch.features, batch.counts
        keys = features.keys()
        begins = copied(self._gpu, torch.tensor([0, *counts]).cumsum(0))
        # Copies, since the caller may write to its own.
        lengths = features.lengths().clone().view(len(keys), features.stride())
        ids = torch.split_with_sizes(features.values().to(torch.int64, copy=True), counts)
        found: dict[str, JaggedTensor] = {}
        launches, places = [], self._places(keys)
        for [reader], names, lookup, of_lookup in zip(
            self._readers(keys, tables), self._names, self._lookups, places, strict=True
        ):
            sizes = [counts[place] for place in of_lookup]
            out = self._empty(sum(sizes), _columns_of(lookup)[0])
            launches.append(reader.decode_rows(tables, features.values(), begins, out))
            for name, place, rows in zip(
                names, of_lookup, torch.split_with_sizes(out, sizes), strict=True
            ):
                weights = ids[place] if self._with_ids else None
                found[name] = JaggedTensor(rows, lengths=lengths[place], weights=weights)
        return found, launches

    def _places(self, keys: Sequence[str]) -> list[list[int]]:
        """Returns the places of each lookup's features among the keys of a batch."""
        return [
            [keys.index(feature) for table in tables for feature in table.feature_names]
            for tables in self._configs
        ]

    def _readers(self, keys: Sequence[str], tables: RegisteredTables) -> list[list[GpuReader]]:
        """Returns the reads of each lookup for batches with these keys."""
        known, readers = self._last
        if known == keys:
            return readers
        readers, first = [], 0
        for lookup, of_lookup, places in zip(
            self._lookups, self._by_lookup, self._places(keys), strict=True
        ):
            readers.append(readers_of(lookup, of_lookup, self._gpu, tables, places, first))
            first += sum(_columns_of(lookup))
        self._last = list(keys), readers  # one store: another thread's batch may have other keys
        return readers

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=self._dtype, device=self._gpu.device)


def readers_of(
    lookup: Any,
    tables: Sequence[StoredTable],
    gpu: Gpu,
    registered: RegisteredTables,
    places: Sequence[int] | None = None,
    first_column: int = 0,
) -> list[GpuReader]:
    """Returns the reads of a lookup's tables in all generations, those of each type of rows.

    Args:
        lookup: FBGEMM's lookup.
        tables: its tables.
        gpu: the GPU.
        registered: tables of any generation.
        places: places of the lookup's features among the keys of the batches. None: they are all.
        first_column: first column of the lookup in a pooled output.
    """
    means = lookup.pooling_mode == PoolingMode.MEAN
    first_columns = list(accumulate(_columns_of(lookup), initial=first_column))
    by_bits: dict[int, list[list[Strip]]] = {}
    for feature, number in enumerate(lookup.feature_table_map):
        table = tables[number]
        strip = Strip(
            feature if places is None else places[feature],
            0 if lookup.pooling_mode == PoolingMode.NONE else first_columns[feature],
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
