"""The stored rows of all ranks in one window, a window for each version."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous
from torchrec_bls.direct.generation import Generation, side_of
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.layout import Shard, TableLayout
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.pieces import Range, page_bytes
from torchrec_bls.direct.shared_tables import RowBlock, SharedTables
from torchrec_bls.direct.sharing import OwnPart, share_parts
from torchrec_bls.direct.steps import Content, Run, content_of
from torchrec_bls.errors import ProtocolError
from torchrec_bls.huge_pages import SAME_PAGES, HugePages
from torchrec_bls.quant.page_shares import Extent, PageShare, cuts_between, page_shares
from torchrec_bls.quant.stored_tables import RowSource, StateDictRows, StoredTable, stored_rows


class RowsGeneration(Generation):
    """Quantized tables of one version, one after the other, with the pages of all ranks. Where the
    tables lie in the window is where they lie in the memory of all tables."""

    def mapped_anew(self) -> "RowsGeneration":
        """Returns the same version without what this process has written to it."""
        anew = RowsGeneration(self.version, self.serial, self.parts, self.pages)
        anew.registered = self.registered
        return anew


@dataclass(frozen=True)
class PlacedRows:
    """The rows of a module's tables in the memory of all tables, and among the bytes of the ranks.

    Attributes:
        tables: tables in the order of their memory.
        shares: pages of each rank, in their order.
        digest: 32 bytes that are equal in two processes exactly if all of this is.
    """

    tables: Sequence[StoredTable]
    shares: Sequence[PageShare]
    digest: bytes

    @classmethod
    def of(
        cls,
        tables: Sequence[StoredTable],
        shards: Mapping[str, Sequence[Shard]],
        huge_pages: HugePages,
    ) -> "PlacedRows":
        """Places rows.

        Args:
            tables: tables in the order of their memory.
            shards: shards of each table, by its name.
            huge_pages: see `page_bytes`.
        """
        page = page_bytes(huge_pages)
        total = -(-max(table.end for table in tables) // page) * page
        extents = [_extent(table, shard) for table in tables for shard in shards[table.name]]
        shares = page_shares(extents, total, page)
        return cls(tables, shares, hashlib.sha256(repr((tables, shares)).encode()).digest())

    def size_of(self, owner: int) -> int:
        """Returns the number of a rank's bytes."""
        return sum(each.end - each.begin for each in self.shares if each.owner == owner)

    def ranges(self, owner: int) -> list[Range]:
        """Returns where the rows of each table begin and end among a rank's bytes."""
        return [(begin, end) for _, _, begin, end in self._rows_of(owner)]

    def content(self, owner: int, source: RowSource, prefix: str) -> Content:
        """Returns the content of a rank's bytes.

        Args:
            owner: the rank.
            source: source of its rows.
            prefix: prefix of the tables' names, for messages.
        """
        return content_of(
            [
                Run(
                    f"{prefix}{table.name}.weight",
                    origin,
                    begin,
                    end,
                    table.row_bytes,
                    4 * table.columns,
                    partial(source.read, table),
                )
                for table, origin, begin, end in self._rows_of(owner)
            ]
        )

    def tables_of(self, owner: int) -> list[StoredTable]:
        """Returns the tables with rows in a rank's pages."""
        return list(dict.fromkeys(table for table, *_ in self._rows_of(owner)))

    def _rows_of(self, owner: int) -> list[tuple[StoredTable, int, int, int]]:
        """Returns consecutive rows of a table in a rank's pages: the table, and among the rank's
        bytes the place of its first row, of the first byte, and after the last byte."""
        rows = []
        for share in self.shares:
            if share.owner != owner:
                continue
            shift = share.offset - share.begin
            for table in self.tables:
                begin, end = max(table.begin, share.begin), min(table.end, share.end)
                if begin < end:
                    rows.append((table, table.begin + shift, begin + shift, end + shift))
        return rows


@dataclass(frozen=True)
class SharedRows(SharedTables):
    """Quantized tables, whose pages lie one after the other among the bytes of their owners.

    Attributes:
        rows: places of the rows.
    """

    rows: PlacedRows

    def ranges(self, owner: int) -> list[Range]:
        """See SharedTables."""
        return self.rows.ranges(owner)

    def _content(self, owner: int, prefix: str, state_dict: Mapping[str, Any]) -> Content:
        """See SharedTables. Tables are whole: float weights, or rows as they are stored."""
        source = StateDictRows(state_dict, prefix, "the state_dict")
        for table in self.rows.tables_of(owner):
            source.check(table)
        return self.rows.content(owner, source, prefix)

    def _generation(self, version: str, serial: int, parts: Sequence[OwnerPart]) -> RowsGeneration:
        """See SharedTables."""
        pages = list(
            chain.from_iterable(
                parts[share.owner].within(
                    self.cuts[share.owner], share.offset, share.offset + share.end - share.begin
                )
                for share in self.rows.shares
            )
        )
        side = side_of(parts)
        window = None if side is None else self.windows.of(side, pages)
        return RowsGeneration(version, serial, parts, pages, window)

    @property
    def given_dtypes(self) -> Sequence[torch.dtype]:
        """See SharedTables. They are quantized."""
        return [torch.float32, torch.float16]

    def stored(self, table: str, rows: torch.Tensor) -> torch.Tensor:
        """See SharedTables."""
        source = StateDictRows({f"{table}.weight": rows}, "", "the new rows")
        return stored_rows(source, replace(self._table(table), rows=len(rows)), 0, len(rows))

    def row_blocks(self, table: str) -> Sequence[RowBlock]:
        """See SharedTables. The pages of one owner are those of all tables."""
        found = self._table(table)
        return [RowBlock(found.begin, 0, found.rows, 0, found.row_bytes)]

    def _table(self, name: str) -> StoredTable:
        return next(each for each in self.rows.tables if each.name == name)

    def check_places(self) -> None:
        """See SharedTables."""
        for owner, size in enumerate(self.sizes):
            if self.rows.size_of(owner) != size:
                raise ProtocolError(
                    f"rank {owner} has {self.rows.size_of(owner)} bytes of tables "
                    f"{sorted(self.layouts)}, but it has announced {size}: install one version of "
                    "torchrec-bls everywhere"
                )


def share_rows(
    group: dist.ProcessGroup,
    name: str,
    deadline: float,
    tables: Sequence[StoredTable],
    layouts: Sequence[TableLayout],
    source: RowSource,
    huge_pages: HugePages,
    gpu: Gpu | None = None,
) -> tuple[SharedRows, RowsGeneration]:
    """Makes this rank's part and maps those of all other ranks, collectively.

    Args:
        group: group of ranks on one host.
        name: name of the module.
        deadline: seconds of each wait for the other ranks.
        tables: tables in the order of their memory, the same on every rank.
        layouts: shards of the tables.
        source: source of the rows that this rank shares.
        huge_pages: what the segments ask for, see huge_pages_for.
        gpu: see SharedTables.

    Raises:
        RendezvousError: a rank has no memory for its rows, cannot map another rank's, can't
            register them with its GPU, or has rows of other weights; all ranks raise.
        ValueError: this rank's source lacks the rows; the others raise RendezvousError.
    """
    rows = PlacedRows.of(tables, {table.name: table.shards for table in layouts}, huge_pages)
    rendezvous = Rendezvous(group, f"{name} quantized tables", deadline)

    def own_part() -> OwnPart:
        for table in rows.tables_of(group.rank()):
            source.check(table)
        cure = "Load the same weights on every rank before the module is sharded"
        same = {
            "huge_pages": (str(huge_pages), SAME_PAGES),
            "weights": (_digest_of_some_rows(rows, source), cure),
        }
        return OwnPart(rows.content(group.rank(), source, ""), {}, same)

    def tables_of(page: _native.ControlPage, told: Sequence[Mapping[str, Any]]) -> SharedRows:
        by_name = {table.name: table for table in layouts}
        sizes = [rows.size_of(owner) for owner in range(group.size())]
        return SharedRows(page, rows.digest, by_name, sizes, huge_pages, rows, gpu=gpu)

    shared, generation = share_parts(rendezvous, group, rows.digest, own_part, tables_of)
    assert isinstance(generation, RowsGeneration)
    return shared, generation


def _extent(table: StoredTable, shard: Shard) -> Extent:
    begin = table.begin + shard.first_row * table.row_bytes
    return Extent(shard.owner, begin, begin + shard.rows * table.row_bytes)


def _digest_of_some_rows(placed: PlacedRows, source: RowSource) -> str:
    """Returns a digest of some rows, which shows ranks with other weights. The rows are the first
    of each table, and those in pages of two ranks, which would mix both ranks' weights."""
    digest = hashlib.sha256()
    cuts = cuts_between(placed.shares)
    for table in placed.tables:
        rows = {(cut - table.begin) // table.row_bytes for cut in cuts}
        for row in sorted({0, *rows}):
            if 0 <= row < table.rows:
                digest.update(stored_rows(source, table, row, row + 1).numpy().tobytes())
    return digest.hexdigest()
