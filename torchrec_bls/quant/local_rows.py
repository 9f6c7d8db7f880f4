"""The stored rows of one rank in its own memory."""

from collections.abc import Mapping, Sequence

import torch

from torchrec_bls.direct.layout import Shard
from torchrec_bls.quant.lookups import Lookups, lookup_of
from torchrec_bls.quant.stored_tables import RowSource, StoredTable, stored_rows


class LocalRows:
    """This rank's rows of each table, one after the other, in FBGEMM's layout.

    The module's state dict shows them: the rows of each table on this rank, and nothing of a table
    without rows here. Writing to them changes the results of lookups.

    Args:
        lookups: lookups of the module.
        shards: shards of each table, by its name.
        source: source of the rows.
        rank: this rank.

    Raises:
        ValueError: the source lacks the rows.
    """

    def __init__(
        self,
        lookups: Lookups,
        shards: Mapping[str, Sequence[Shard]],
        source: RowSource,
        rank: int,
    ) -> None:
        self._rows: dict[tuple[str, int], torch.Tensor] = {}
        for configs, made, tables in zip(
            lookups.configs, lookups.made, lookups.by_lookup, strict=True
        ):
            shown, specs, own = [], [], []
            for config, spec, table in zip(configs, made.embedding_specs, tables, strict=True):
                of_rank = local_shards(shards[table.name], rank)
                if not of_rank:
                    lookups.hide(table.name)
                    continue
                name, _, *kind = spec
                shown.append(config)
                specs.append((name, sum(shard.rows for shard in of_rank), *kind))
                own.append((table, of_rank))
            if not specs:
                continue
            held = lookup_of(specs, made)
            for offset, (table, of_rank) in zip(held.weights_physical_offsets, own, strict=True):
                self._fill(held.weights_host, offset, table, of_rank, source)
            lookups.show(shown, held)

    def _fill(
        self,
        memory: torch.Tensor,
        offset: int,
        table: StoredTable,
        shards: Sequence[Shard],
        source: RowSource,
    ) -> None:
        for shard in shards:
            end = offset + shard.rows * table.row_bytes
            rows = memory[offset:end].view(shard.rows, table.row_bytes)
            rows.copy_(stored_rows(source, table, shard.first_row, shard.first_row + shard.rows))
            self._rows[table.name, shard.first_row] = rows
            offset = end

    def of(self, table: str, first_row: int) -> torch.Tensor:
        """Returns the shard that begins at a row, uint8 [rows, bytes of a row]."""
        return self._rows[table, first_row]


def local_shards(shards: Sequence[Shard], rank: int) -> list[Shard]:
    """Returns a rank's shards that have rows, first rows first."""
    own = [shard for shard in shards if shard.owner == rank and shard.rows]
    return sorted(own, key=lambda shard: shard.first_row)
