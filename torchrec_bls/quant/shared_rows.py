"""The stored rows of all ranks in one piece of address space."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous, require_equal
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.layout import Shard
from torchrec_bls.quant.page_shares import Extent, PageShare, cuts_between, page_shares
from torchrec_bls.quant.stored_tables import RowSource, StoredTable, stored_bytes

SMALL_PAGE, HUGE_PAGE = 4096, 2 << 20


class SharedRows:
    """Tables one after the other, with each rank's rows in its own sealed segment.

    Every rank maps the pages of all segments privately, in the order of the tables. So a row-wise
    table is one plain table here. What a process writes to it, no other process sees.

    Args:
        group: group of ranks on one host.
        name: name of the module.
        deadline: seconds of each wait for the other ranks.
        tables: tables in the order of their memory, the same on every rank.
        shards: shards of each table, by its name.
        source: source of the rows that this rank shares.
        huge_pages: whether to share pages of 2 MiB.

    Attributes:
        memory: uint8, the memory of all tables.
        segments: segments by rank, kept so that tables outlive their owner.

    Raises:
        RendezvousError: a rank has no memory for its rows, cannot map another rank's, or has rows
            of other weights; all ranks raise.
        ValueError: this rank's source lacks the rows; the others raise RendezvousError.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        deadline: float,
        tables: Sequence[StoredTable],
        shards: Mapping[str, Sequence[Shard]],
        source: RowSource,
        huge_pages: bool,
    ) -> None:
        page = HUGE_PAGE if huge_pages else SMALL_PAGE
        total = -(-max(table.end for table in tables) // page) * page
        extents = [_extent(table, shard) for table in tables for shard in shards[table.name]]
        first_offset = max(page, _native.FIRST_TABLE_OFFSET)
        shares = page_shares(extents, total, page, first_offset)
        digest = hashlib.sha256(repr((tables, shares)).encode()).digest()
        rendezvous = Rendezvous(group, f"{name} quantized tables", deadline)
        with rendezvous.own_part():
            segment = _segment(group.rank(), digest, tables, shares, source, huge_pages)
            weights = _digest_of_some_rows(tables, shares, source)
        records = rendezvous.exchange("tables", {"address": segment.address, "weights": weights})
        cure = "Load the same weights on every rank before the module is sharded"
        require_equal(name, records, {"weights": cure}, rendezvous.names)
        with rendezvous.own_part():
            self.segments = [
                segment
                if rank == group.rank()
                else _native.TableSegment.open(
                    tuple(record["address"]), (rank, FIRST_VERSION, digest)
                )
                for rank, record in enumerate(records)
            ]
            window = _native.TableWindow(
                [
                    (self.segments[share.owner], share.offset, share.end - share.begin)
                    for share in shares
                ]
            )
        rendezvous.exchange("mapped", {})
        self.memory = torch.frombuffer(window, dtype=torch.uint8)


def _extent(table: StoredTable, shard: Shard) -> Extent:
    begin = table.begin + shard.first_row * table.row_bytes
    return Extent(shard.owner, begin, begin + shard.rows * table.row_bytes)


def _segment(
    rank: int,
    digest: bytes,
    tables: Sequence[StoredTable],
    shares: Sequence[PageShare],
    source: RowSource,
    huge_pages: bool,
) -> _native.TableSegment:
    own = [share for share in shares if share.owner == rank]
    pieces = [
        (stored_bytes(source, table, begin, end), share.offset + begin - share.begin)
        for share in own
        for table in tables
        for begin, end in [(max(table.begin, share.begin), min(table.end, share.end))]
        if begin < end
    ]
    size = max((share.offset + share.end - share.begin for share in own), default=0)
    return _native.TableSegment.create(
        (rank, FIRST_VERSION, digest),
        pieces,
        size,
        huge_pages,
    )


def _digest_of_some_rows(
    tables: Sequence[StoredTable], shares: Sequence[PageShare], source: RowSource
) -> str:
    """Returns a digest of some rows, which shows ranks with other weights. The rows are the first
    of each table, and those in pages of two ranks, which would mix both ranks' weights."""
    digest = hashlib.sha256()
    cuts = cuts_between(shares)
    for table in tables:
        rows = {(cut - table.begin) // table.row_bytes for cut in cuts}
        for row in sorted({0, *rows}):
            if 0 <= row < table.rows:
                digest.update(source.rows(table, row, row + 1).contiguous().numpy().tobytes())
    return digest.hexdigest()
