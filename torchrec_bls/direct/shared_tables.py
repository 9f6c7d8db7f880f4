"""The tables of a sharded module in shared memory, one segment of each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous, host_identity
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.errors import RendezvousError

FIRST_GENERATION = 1


@dataclass(frozen=True)
class OwnTables:
    """What a rank puts into its segment.

    Attributes:
        live: its weights.
        shards: tensors of its shards, [rows, columns], in the memory of `live`.
    """

    live: LiveWeights
    shards: Mapping[tuple[str, Shard], torch.Tensor]


def share_tables(
    group: dist.ProcessGroup,
    name: str,
    deadline: float,
    tables: Sequence[TableLayout],
    own: OwnTables,
    item_bytes: int,
    huge_pages: bool,
) -> Generation:
    """Makes this rank's segment and maps those of all others, collectively.

    Args:
        group: ranks of one host.
        name: of the module.
        deadline: in seconds, of each wait for the other ranks.
        tables: the same on every rank.
        own: of this rank.
        item_bytes: of a weight.
        huge_pages: whether to ask for pages of 2 MiB.

    Raises:
        RendezvousError: a rank has no memory for its tables or cannot map those of another; all
            ranks raise.
    """
    rendezvous = Rendezvous(group, f"{name} tables", deadline)
    digest = digest_of(tables)
    with rendezvous.own_part("tables"):
        segment = _native.TableSegment.create(
            (group.rank(), FIRST_GENERATION, digest),
            own.live.parts(),
            own.live.segment_bytes,
            huge_pages,
        )
    offsets = [own.live.offset_of(own.shards[key]) for key in _keys_of(tables, group.rank())]
    # Ranks have different numbers of shards, and records are all of one form.
    own_offsets = " ".join(map(str, offsets))
    records = rendezvous.exchange("tables", {"address": segment.address, "offsets": own_offsets})
    segments: list[_native.TableSegment] = []
    places: dict[tuple[str, Shard], int] = {}
    with rendezvous.own_part("mapped"):
        for rank, record in enumerate(records):
            label = (rank, FIRST_GENERATION, digest)
            segments.append(
                segment
                if rank == group.rank()
                else _native.TableSegment.open(tuple(record["address"]), label)
            )
            told = [int(offset) for offset in record["offsets"].split()]
            places |= _places(tables, rank, told, segments[-1].size, item_bytes)
    rendezvous.exchange("mapped", {})
    own.live.move_to(segment)
    return Generation(
        FIRST_GENERATION, segments, places, {table.name: table for table in tables}, item_bytes
    )


def agree_on_direct_reads(group: dist.ProcessGroup, name: str, deadline: float, reason: str) -> str:
    """Returns why the ranks can't read tables directly, the same on all of them; empty if they can.

    Args:
        group: the module's ranks.
        name: of the module.
        deadline: in seconds, for the other ranks to come.
        reason: why this rank can't; empty if it can.
    """
    rendezvous = Rendezvous(group, f"{name} direct reads", deadline)
    records = rendezvous.exchange("possible", {"reason": reason, "host": host_identity()})
    for rank, record in enumerate(records):
        if record["reason"]:
            return f"rank {rank}: {record['reason']}"
    hosts = [record["host"] for record in records]
    if len(set(hosts)) == 1:
        return ""
    other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
    return f"ranks 0 and {other} are on different hosts, or in different PID namespaces"


def _keys_of(tables: Sequence[TableLayout], rank: int) -> list[tuple[str, Shard]]:
    return [
        (table.name, shard) for table in tables for shard in table.shards if shard.owner == rank
    ]


def _places(
    tables: Sequence[TableLayout], rank: int, offsets: Sequence[int], size: int, item_bytes: int
) -> dict[tuple[str, Shard], int]:
    """Returns where the shards of a rank lie, which it announced as `offsets`."""
    keys = _keys_of(tables, rank)
    if len(keys) != len(offsets):
        _refuse(rank, f"{len(offsets)} shards, but the plan gives it {len(keys)}")
    for (table, shard), offset in zip(keys, offsets, strict=True):
        end = offset + shard.rows * shard.columns * item_bytes
        if not _native.FIRST_TABLE_OFFSET <= offset <= end <= size:
            _refuse(rank, f"a shard of table '{table}' at bytes {offset} to {end} of {size}")
    return dict(zip(keys, offsets, strict=True))


def _refuse(rank: int, what: str) -> NoReturn:
    raise RendezvousError(
        f"rank {rank} announced {what}. Install one version of torchrec-bls on all ranks"
    )
