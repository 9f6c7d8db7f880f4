"""The rows that a batch asks each rank for, and their places when they arrive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls import _native
from torchrec_bls.direct.layout import Shard
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.quant.local_rows import LocalRows, local_shards
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.stored_tables import StoredTable

_LINE = 64


@dataclass(frozen=True)
class AskedBatch:
    """A batch in the forms for the exchange and for the lookup.

    Attributes:
        sent: distinct rows that are asked for, for each block of the plan, counted from the block's
            first row; in one sample.
        samples: number of samples of the batch.
        features: the batch, with the numbers of arrived rows as ids.
        placed: places of the arrived rows of each block: offset in bytes, rows, bytes of a row,
            bytes from row to row.
        offsets: places of the rows of each lookup's features, in bytes, int64.
        scratch_bytes: bytes of all arrived rows.
    """

    sent: KeyedJaggedTensor
    samples: int
    features: KeyedJaggedTensor
    placed: list[tuple[int, int, int, int]]
    offsets: list[torch.Tensor]
    scratch_bytes: int


class _LookedUp(NamedTuple):
    feature: str
    table: StoredTable


class _Block(NamedTuple):
    """Rows of one rank for one lookup of a feature. `place` is that lookup's number."""

    place: int
    shard: Shard


class RowPlan:
    """The blocks of rows that each batch asks for, the same on every rank.

    Args:
        lookups: lookups of the module.
        shards: shards of each table, by its name.
        world_size: number of ranks.

    Attributes:
        features: features that are looked up, in the order of the lookups.
        splits: number of blocks of each rank.
        used_bytes: bytes of a row of each block.
        row_type: dtype of the numbers of rows that are asked for.
    """

    def __init__(
        self, lookups: Lookups, shards: Mapping[str, Sequence[Shard]], world_size: int
    ) -> None:
        of_lookups = [
            [
                _LookedUp(feature, table)
                for config, table in zip(configs, tables, strict=True)
                for feature in config.feature_names
            ]
            for configs, tables in zip(lookups.configs, lookups.by_lookup, strict=True)
        ]
        self._looked_up = [each for of_lookup in of_lookups for each in of_lookup]
        self._lookup_sizes = [len(of_lookup) for of_lookup in of_lookups]
        by_rank = [
            [
                _Block(place, shard)
                for place, each in enumerate(self._looked_up)
                for shard in local_shards(shards[each.table.name], rank)
            ]
            for rank in range(world_size)
        ]
        self._blocks = [block for of_rank in by_rank for block in of_rank]
        self._block_names = [str(number) for number in range(len(self._blocks))]
        self._keys: list[str] | None = None
        self._key_of: list[int] = []
        self._requests = self._requests_of(range(len(self._looked_up)), len(self._looked_up))
        self.features = [each.feature for each in self._looked_up]
        self.splits = [len(of_rank) for of_rank in by_rank]
        self.used_bytes = [self._looked_up[block.place].table.used_bytes for block in self._blocks]
        self.row_type = torch.int32 if self._requests.row_bytes == 4 else torch.int64

    def tables_of(self, rank: int, rows: LocalRows) -> _native.Tables:
        """Returns the tables that a rank's blocks belong to."""
        first = sum(self.splits[:rank])
        tables = []
        for place, shard in self._blocks[first : first + self.splits[rank]]:
            table = self._looked_up[place].table
            tables.append((rows.of(table.name, shard.first_row), table.used_bytes))
        return _native.Tables.stored(tables)

    def ask(self, batch: CheckedBatch) -> AskedBatch:
        """Returns the rows that a batch asks for."""
        features = batch.features
        keys = features.keys()
        if keys != self._keys:
            self._bind(keys)
        ids = features.values()
        asked = self._requests.ask(ids, batch.counts)
        distinct = asked.distinct
        begins, at = [], 0
        for key, each in zip(self._key_of, self._looked_up, strict=True):
            begins.append(at)
            at += -(-distinct[key] * each.table.row_bytes // _LINE) * _LINE
        placed = []
        for block, count, first in zip(
            self._blocks, asked.counts, asked.first_numbers, strict=True
        ):
            table = self._looked_up[block.place].table
            offset = begins[block.place] + first * table.row_bytes
            placed.append((offset, count, table.used_bytes, table.row_bytes))
        weights = features.weights_or_none()
        return AskedBatch(
            KeyedJaggedTensor(
                keys=self._block_names,
                values=_tensor(asked.rows, self.row_type),
                lengths=torch.tensor(asked.counts, dtype=torch.int32),
                stride=1,
            ),
            features.stride(),
            KeyedJaggedTensor(
                keys=keys,
                values=_tensor(asked.numbers, ids.dtype),
                # Copies: the batch's own memory is the caller's again, once this is posted.
                weights=None if weights is None else weights.clone(),
                lengths=features.lengths().clone(),
                stride=features.stride(),
            ),
            placed,
            list(torch.split(torch.tensor(begins), self._lookup_sizes)),
            at + _LINE,  # kernels get some memory, even if a batch asks for no rows
        )

    def _bind(self, keys: list[str]) -> None:
        self._key_of = [keys.index(each.feature) for each in self._looked_up]
        self._requests = self._requests_of(self._key_of, len(keys))
        self._keys = list(keys)

    def _requests_of(self, key_of: Sequence[int], keys: int) -> _native.RowRequests:
        blocks = [
            (key_of[place], shard.first_row, shard.first_row + shard.rows)
            for place, shard in self._blocks
        ]
        return _native.RowRequests(keys, blocks)


def _tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)
