"""The rows and columns of a table that each rank has."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrec.distributed.types import ParameterSharding, ShardMetadata


@dataclass(frozen=True)
class Shard:
    """A rectangle of a table that one rank owns.

    Attributes:
        owner: rank that owns it.
        first_row: first row in the table.
        rows: number of rows; 0 where a table has fewer rows than ranks.
        first_column: first column in the table.
        columns: number of columns.
    """

    owner: int
    first_row: int
    rows: int
    first_column: int
    columns: int

    @classmethod
    def of(cls, metadata: ShardMetadata) -> "Shard":
        """Returns the shard that TorchRec describes."""
        rows, columns = metadata.shard_sizes
        first_row, first_column = metadata.shard_offsets
        return cls(metadata.placement.rank(), first_row, rows, first_column, columns)


@dataclass(frozen=True)
class TableLayout:
    """The shards of a table.

    Attributes:
        name: name of the table.
        rows: number of rows.
        columns: number of columns.
        dtype: dtype of the weights, as torch prints it.
        shards: shards that cover the table, in the order of the plan.
    """

    name: str
    rows: int
    columns: int
    dtype: str
    shards: tuple[Shard, ...]

    def column_pieces(self) -> list[list[Shard]]:
        """Returns the blocks of rows of each piece of columns, first rows first.

        Raises:
            ValueError: the blocks, except the last ones, are not all as long as the first.
        """
        pieces: dict[int, list[Shard]] = defaultdict(list)
        for shard in self.shards:
            pieces[shard.first_column].append(shard)
        return [self._in_equal_blocks(piece) for _, piece in sorted(pieces.items())]

    def check_cover(self) -> None:
        """Raises ValueError if the shards are not the whole table and nothing else."""
        end, fits = 0, True
        for piece in self.column_pieces():
            columns = piece[0].columns
            fits &= piece[0].first_column == end
            fits &= all(block.columns == columns for block in piece)
            end += columns
        if not fits or end != self.columns:
            raise ValueError(
                f"the shards of table '{self.name}' do not cover its {self.columns} columns"
            )

    def in_whole_rows(self) -> "TableLayout":
        """Returns the layout with shards of all columns. A plan for stored rows may count columns
        in bytes or packed numbers."""
        shards = tuple(replace(each, first_column=0, columns=self.columns) for each in self.shards)
        return replace(self, shards=shards)

    def has_each_row_once(self) -> bool:
        """Returns whether the shards are blocks of whole rows that make up the table."""
        end = 0
        for first_row, rows in sorted((shard.first_row, shard.rows) for shard in self.shards):
            if rows and first_row != end:
                return False
            end += rows
        return end == self.rows

    def _in_equal_blocks(self, shards: list[Shard]) -> list[Shard]:
        blocks = sorted(shards, key=lambda shard: (shard.first_row, shard.owner))
        length = blocks[0].rows
        for number in range(max(len(blocks), -(-self.rows // max(1, length)))):
            block = blocks[number] if number < len(blocks) else None
            expected = max(0, min(length, self.rows - number * length))
            if (
                block is None
                or block.rows != expected
                or (expected and block.first_row != number * length)
            ):
                raise ValueError(
                    f"table '{self.name}' is planned in blocks of unequal rows "
                    f"({[each.rows for each in blocks]}), of which direct reads cannot tell which "
                    "has an id: plan it in equal blocks, as row_wise() does, or table-wise"
                )
        return blocks


def layouts_of(tables: Iterable[Any], params: Mapping[str, ParameterSharding]) -> list[TableLayout]:
    """Returns the rows and columns of each rank, for each table.

    Args:
        tables: EmbeddingConfig or EmbeddingBagConfig of each table.
        params: the module's plan; no table is data-parallel.
    """
    return [
        TableLayout(
            table.name,
            table.num_embeddings,
            table.embedding_dim,
            table.data_type.name,
            tuple(Shard.of(shard) for shard in _shards_of(params[table.name])),
        )
        for table in tables
    ]


def _shards_of(planned: ParameterSharding) -> list[ShardMetadata]:
    shards: list[ShardMetadata] = planned.sharding_spec.shards
    return shards


def digest_of(tables: Sequence[TableLayout]) -> bytes:
    """Returns 32 bytes that are equal on two ranks exactly if their layouts are."""
    return hashlib.sha256(repr(tuple(tables)).encode()).digest()
