"""The stored rows of all ranks in one piece of address space, a piece for each version."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous, require_equal
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.dense_weights import Parts
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.layout import Shard, TableLayout
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.direct.sharing import FIRST_SERIAL, OwnSegment, share_segments
from torchrec_bls.errors import ProtocolError
from torchrec_bls.quant.page_shares import Extent, PageShare, cuts_between, page_shares
from torchrec_bls.quant.stored_tables import RowSource, StateDictRows, StoredTable, stored_bytes

_SMALL_PAGE, _HUGE_PAGE = 4096, 2 << 20
# Bytes of rows that are made at once while a segment is filled.
_STEP = 16 << 20


class RowsGeneration(Generation):
    """Quantized tables of one version, one after the other, with the pages of all ranks.

    Pages are mapped privately. What this process writes to them, no other one sees.

    Args:
        version: see Generation.
        serial: see Generation.
        segments: see Generation.
        shares: pages of each rank, in their order.

    Attributes:
        window: memory of all tables.
    """

    def __init__(
        self,
        version: str,
        serial: int,
        segments: Sequence[_native.TableSegment],
        shares: Sequence[PageShare],
    ) -> None:
        super().__init__(version, serial, segments)
        self._shares = shares
        self.window = _native.TableWindow(
            [
                (self.segments[share.owner], share.offset, share.end - share.begin)
                for share in shares
            ]
        )

    @property
    def mappings(self) -> Sequence[object]:
        """See Generation."""
        return [*self.segments, self.window]

    def mapped_anew(self) -> "RowsGeneration":
        """Returns the same version without what this process has written to it."""
        return RowsGeneration(self.version, self.serial, self.segments, self._shares)


@dataclass(frozen=True)
class PlacedRows:
    """The rows of a module's tables in the memory of all tables, and in the ranks' segments.

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
        huge_pages: bool,
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
        shares = page_shares(extents, total, page, max(page, _native.FIRST_TABLE_OFFSET))
        return cls(tables, shares, hashlib.sha256(repr((tables, shares)).encode()).digest())

    def size_of(self, owner: int) -> int:
        """Returns the bytes of a rank's segment."""
        ends = [each.offset + each.end - each.begin for each in self.shares if each.owner == owner]
        return max(ends, default=int(_native.FIRST_TABLE_OFFSET))

    def parts(self, owner: int, source: RowSource) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields the content of a rank's segment, a step at a time, with its places in bytes."""
        for share in self.shares:
            if share.owner != owner:
                continue
            for table in self.tables:
                begin, end = max(table.begin, share.begin), min(table.end, share.end)
                for at in range(begin, end, _STEP):
                    rows = stored_bytes(source, table, at, min(at + _STEP, end))
                    yield rows, share.offset + at - share.begin

    def tables_of(self, owner: int) -> list[StoredTable]:
        """Returns the tables with rows in a rank's pages."""
        own = [share for share in self.shares if share.owner == owner]
        return [
            table
            for table in self.tables
            if any(table.begin < share.end and share.begin < table.end for share in own)
        ]


@dataclass(frozen=True)
class SharedRows(SharedTables):
    """Quantized tables, whose pages lie one after the other in the segments of their owners.

    Attributes:
        rows: places of the rows.
    """

    rows: PlacedRows

    def parts(self, owner: int, prefix: str, state_dict: Mapping[str, Any]) -> Parts:
        """See SharedTables. Tables are whole: float weights, or rows as they are stored."""
        source = StateDictRows(state_dict, prefix, "the state_dict")
        for table in self.rows.tables_of(owner):
            source.check(table)
        return self.rows.parts(owner, source)

    def generation(
        self, version: str, serial: int, segments: Sequence[_native.TableSegment]
    ) -> RowsGeneration:
        """See SharedTables."""
        return RowsGeneration(version, serial, segments, self.rows.shares)

    def check_places(self) -> None:
        """See SharedTables."""
        for owner, size in enumerate(self.sizes):
            if self.rows.size_of(owner) > size:
                raise ProtocolError(
                    f"rank {owner} has rows of tables {sorted(self.layouts)} up to byte "
                    f"{self.rows.size_of(owner)} of {size}: install one version of torchrec-bls "
                    "everywhere"
                )


def page_bytes(huge_pages: bool) -> int:
    """Returns the size of the pages that rows are cut by, in bytes."""
    return _HUGE_PAGE if huge_pages else _SMALL_PAGE


def share_rows(
    group: dist.ProcessGroup,
    name: str,
    deadline: float,
    tables: Sequence[StoredTable],
    layouts: Sequence[TableLayout],
    source: RowSource,
    huge_pages: bool,
) -> tuple[SharedRows, RowsGeneration]:
    """Makes this rank's segment and maps those of all other ranks, collectively.

    Args:
        group: group of ranks on one host.
        name: name of the module.
        deadline: seconds of each wait for the other ranks.
        tables: tables in the order of their memory, the same on every rank.
        layouts: shards of the tables.
        source: source of the rows that this rank shares.
        huge_pages: whether to share pages of 2 MiB.

    Raises:
        RendezvousError: a rank has no memory for its rows, cannot map another rank's, or has rows
            of other weights; all ranks raise.
        ValueError: this rank's source lacks the rows; the others raise RendezvousError.
    """
    rows = PlacedRows.of(tables, {table.name: table.shards for table in layouts}, huge_pages)
    rendezvous = Rendezvous(group, f"{name} quantized tables", deadline)

    def own_segment() -> OwnSegment:
        for table in rows.tables_of(group.rank()):
            source.check(table)
        told = {"weights": _digest_of_some_rows(rows, source)}
        return OwnSegment(rows.parts(group.rank(), source), rows.size_of(group.rank()), told)

    def use(
        page: _native.ControlPage,
        segments: list[_native.TableSegment],
        records: Sequence[Mapping[str, Any]],
    ) -> tuple[SharedRows, RowsGeneration]:
        cure = "Load the same weights on every rank before the module is sharded"
        require_equal(name, records, {"weights": cure}, rendezvous.names)
        by_name = {table.name: table for table in layouts}
        sizes = [segment.size for segment in segments]
        shared = SharedRows(page, rows.digest, by_name, sizes, huge_pages, rows)
        return shared, shared.generation(FIRST_VERSION, FIRST_SERIAL, segments)

    return share_segments(rendezvous, group, rows.digest, own_segment, huge_pages, use)


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
                digest.update(source.rows(table, row, row + 1).contiguous().numpy().tobytes())
    return digest.hexdigest()
