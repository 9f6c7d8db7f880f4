"""The float tables of a sharded module in shared memory: shards, one after the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.dense_weights import Parts
from torchrec_bls.direct.generation import FloatGeneration
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.new_weights import cut, entry_of
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.direct.sharing import FIRST_SERIAL, OwnSegment, abandon_with, share_segments
from torchrec_bls.errors import ProtocolError, RendezvousError


@dataclass(frozen=True)
class FloatTables(SharedTables):
    """Float tables, whose shards lie one after the other in the segments of their owners.

    Attributes:
        offsets: places of the shards in the segments of their owners, in bytes.
        dtype: dtype of the weights.
    """

    offsets: Mapping[tuple[str, Shard], int]
    dtype: torch.dtype

    def offsets_of(self, layout: TableLayout) -> list[int]:
        """Returns the places of a table's shards, in the order of its layout."""
        return [self.offsets[layout.name, shard] for shard in layout.shards]

    def parts(self, owner: int, prefix: str, state_dict: Mapping[str, Any]) -> Parts:
        """See SharedTables. Tables are whole tensors, or ShardedTensors with the owner's shards."""
        return [
            (
                cut(key, entry_of(state_dict, key), layout, shard, self.dtype),
                self.offsets[layout.name, shard],
            )
            for layout, shard in self._shards_of(owner)
            for key in (f"{prefix}{layout.name}.weight",)
        ]

    def generation(
        self, version: str, serial: int, segments: Sequence[_native.TableSegment]
    ) -> FloatGeneration:
        """See SharedTables."""
        for segment in segments:
            segment.populate()
        item_bytes = self.dtype.itemsize
        return FloatGeneration(version, serial, segments, self.offsets, self.layouts, item_bytes)

    def check_places(self) -> None:
        """See SharedTables."""
        for layout in self.layouts.values():
            for shard in layout.shards:
                offset = self.offsets[layout.name, shard]
                end = offset + shard.rows * shard.columns * self.dtype.itemsize
                size = self.sizes[shard.owner]
                if not _native.FIRST_TABLE_OFFSET <= offset <= end <= size:
                    raise ProtocolError(
                        f"rank {shard.owner} has a shard of table '{layout.name}' at bytes "
                        f"{offset} to {end} of {size}: install one version of torchrec-bls "
                        "everywhere"
                    )

    def _shards_of(self, owner: int) -> Iterator[tuple[TableLayout, Shard]]:
        """Yields the shards that have rows and columns."""
        for layout in self.layouts.values():
            for shard in layout.shards:
                if shard.owner == owner and shard.rows * shard.columns:
                    yield layout, shard


@dataclass(frozen=True)
class OwnTables:
    """The weights that a rank puts into its segment.

    Attributes:
        live: the rank's weights.
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
    dtype: torch.dtype,
    huge_pages: bool,
    session: str = "",
) -> tuple[FloatTables, FloatGeneration]:
    """Makes this rank's segment and maps those of all other ranks, collectively.

    Args:
        group: ranks of one host.
        name: name of the module.
        deadline: seconds of each wait for the other ranks.
        tables: layouts of the tables, the same on every rank.
        own: weights of this rank.
        dtype: dtype of the weights.
        huge_pages: whether to ask for pages of 2 MiB.
        session: session of the module's agreement.

    Raises:
        RendezvousError: a rank has no memory for its tables, or cannot map another rank's; all
            ranks raise.
    """
    rendezvous = Rendezvous(group, f"{name} tables", deadline, session=session)
    digest, rank = digest_of(tables), group.rank()
    offsets = [own.live.offset_of(own.shards[key]) for key in _keys_of(tables, rank)]

    def own_segment() -> OwnSegment:
        # Ranks have different numbers of shards, but all records need one form.
        told = {"offsets": " ".join(map(str, offsets))}
        return OwnSegment(own.live.storages(), own.live.segment_bytes, told)

    def use(
        page: _native.ControlPage,
        segments: list[_native.TableSegment],
        records: Sequence[Mapping[str, Any]],
    ) -> tuple[FloatTables, FloatGeneration]:
        places: dict[tuple[str, Shard], int] = {}
        sizes = [segment.size for segment in segments]
        for other, (record, size) in enumerate(zip(records, sizes, strict=True)):
            told = [int(offset) for offset in record["offsets"].split()]
            places |= _places(tables, other, told, size, dtype.itemsize)
        layouts = {table.name: table for table in tables}
        shared = FloatTables(page, digest, layouts, sizes, huge_pages, places, dtype)
        return shared, shared.generation(FIRST_VERSION, FIRST_SERIAL, segments)

    shared, generation = share_segments(rendezvous, group, digest, own_segment, huge_pages, use)
    pages = _native.PrivatePages(generation.segments[rank])
    shared.held.add(generation.serial, [pages])
    own.live.move_to(pages)
    # The weights end with the module. So nobody can publish here any more.
    abandon_with(own.live, shared.page, rank)
    return shared, generation


def _keys_of(tables: Sequence[TableLayout], rank: int) -> list[tuple[str, Shard]]:
    return [
        (table.name, shard) for table in tables for shard in table.shards if shard.owner == rank
    ]


def _places(
    tables: Sequence[TableLayout], rank: int, offsets: Sequence[int], size: int, item_bytes: int
) -> dict[tuple[str, Shard], int]:
    """Returns the places of a rank's shards, which it announced as `offsets`."""
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
