"""The float tables of a sharded module in shared memory: shards, one after the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous
from torchrec_bls.direct.generation import FloatGeneration, side_of
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.new_weights import entry_of, rows_of_shard
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.pieces import Range
from torchrec_bls.direct.shared_tables import RowBlock, SharedTables
from torchrec_bls.direct.sharing import OwnPart, abandon_with, share_parts
from torchrec_bls.direct.steps import Content, RowsRead, Run, content_in_memory, content_of
from torchrec_bls.errors import ProtocolError, RendezvousError
from torchrec_bls.huge_pages import SAME_PAGES, HugePages, huge_pages_for


@dataclass(frozen=True)
class FloatTables(SharedTables):
    """Float tables, whose shards lie one after the other among the bytes of their owners.

    Attributes:
        offsets: places of the shards among the bytes of their owners.
        dtype: dtype of the weights.
    """

    offsets: Mapping[tuple[str, Shard], int]
    dtype: torch.dtype

    def offsets_of(self, layout: TableLayout) -> list[int]:
        """Returns the places of a table's shards, in the order of its layout."""
        return [self.offsets[layout.name, shard] for shard in layout.shards]

    def ranges(self, owner: int) -> list[Range]:
        """See SharedTables."""
        return [self._range_of(layout, shard) for layout, shard in self._shards_of(owner)]

    def _content(self, owner: int, prefix: str, state_dict: Mapping[str, Any]) -> Content:
        """See SharedTables. Tables are whole, or ShardedTensors with the owner's shards."""
        runs = []
        for layout, shard in self._shards_of(owner):
            key = f"{prefix}{layout.name}.weight"
            entry = entry_of(state_dict, key)
            read = rows_of_shard(key, entry, layout, shard, self.dtype)
            begin, end = self._range_of(layout, shard)
            row_bytes = shard.columns * self.dtype.itemsize
            whole_row_bytes = layout.columns * self.dtype.itemsize
            runs.append(Run(key, begin, begin, end, row_bytes, whole_row_bytes, _as_stored(read)))
        return content_of(runs)

    def _generation(self, version: str, serial: int, parts: Sequence[OwnerPart]) -> FloatGeneration:
        """See SharedTables."""
        pages = list(
            chain.from_iterable(
                part.within(cut, 0, cut.size) for part, cut in zip(parts, self.cuts, strict=True)
            )
        )
        side = side_of(parts)
        window = None if side is None else self.windows.of(side, pages)
        places, item_bytes = self._places_in_window, self.dtype.itemsize
        return FloatGeneration(
            version, serial, parts, pages, window, places, self.layouts, item_bytes
        )

    @property
    def given_dtypes(self) -> Sequence[torch.dtype]:
        """See SharedTables."""
        return [self.dtype]

    def stored(self, table: str, rows: torch.Tensor) -> torch.Tensor:
        """See SharedTables."""
        return rows.contiguous().view(torch.uint8)

    def row_blocks(self, table: str) -> Sequence[RowBlock]:
        """See SharedTables."""
        return [
            RowBlock(
                self.offsets[table, shard],
                shard.first_row,
                shard.rows,
                shard.first_column * self.dtype.itemsize,
                shard.columns * self.dtype.itemsize,
            )
            for shard in self.layouts[table].shards
            if shard.rows * shard.columns
        ]

    def own_pages(self, part: OwnerPart) -> _native.TableWindow:
        """Returns a private view of an owner's bytes. Until they are used, they take addresses
        alone.

        Raises:
            BLSError: it can't be mapped.
        """
        cut = self.cuts[part.label.owner]
        return _native.TableWindow(list(part.within(cut, 0, cut.size)))

    def check_places(self) -> None:
        """See SharedTables."""
        for layout in self.layouts.values():
            for shard in layout.shards:
                begin, end = self._range_of(layout, shard)
                size = self.sizes[shard.owner]
                if not begin <= end <= size:
                    raise ProtocolError(
                        f"rank {shard.owner} has a shard of table '{layout.name}' at bytes "
                        f"{begin} to {end} of {size}: install one version of torchrec-bls "
                        "everywhere"
                    )

    @cached_property
    def _places_in_window(self) -> dict[tuple[str, Shard], int]:
        begins = [0, *accumulate(cut.size for cut in self.cuts)]
        return {key: begins[key[1].owner] + offset for key, offset in self.offsets.items()}

    def _range_of(self, layout: TableLayout, shard: Shard) -> Range:
        begin = self.offsets[layout.name, shard]
        return begin, begin + shard.rows * shard.columns * self.dtype.itemsize

    def _shards_of(self, owner: int) -> Iterator[tuple[TableLayout, Shard]]:
        """Yields the shards that have rows and columns."""
        for layout in self.layouts.values():
            for shard in layout.shards:
                if shard.owner == owner and shard.rows * shard.columns:
                    yield layout, shard


def _as_stored(read: Callable[[int, int], torch.Tensor]) -> Callable[[int, int], RowsRead]:
    def read_rows(first: int, end: int) -> RowsRead:
        rows = read(first, end)
        return RowsRead((rows,), lambda: rows)

    return read_rows


@dataclass(frozen=True)
class OwnTables:
    """The weights that a rank shares.

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
    huge_pages: HugePages | None,
    session: str = "",
    gpu: Gpu | None = None,
) -> tuple[FloatTables, FloatGeneration]:
    """Makes this rank's part and maps those of all other ranks, collectively.

    Args:
        group: ranks of one host.
        name: name of the module.
        deadline: seconds of each wait for the other ranks.
        tables: layouts of the tables, the same on every rank.
        own: weights of this rank.
        dtype: dtype of the weights.
        huge_pages: see BLSConfig.
        session: session of the module's agreement.
        gpu: see SharedTables.

    Raises:
        RendezvousError: a rank has no memory for its tables, or cannot map another rank's, or can't
            register them with its GPU; all ranks raise.
    """
    rendezvous = Rendezvous(group, f"{name} tables", deadline, session=session)
    digest, rank = digest_of(tables), group.rank()
    weights = sum(table.rows * table.columns for table in tables)
    huge_pages = huge_pages_for(huge_pages, weights * dtype.itemsize)
    offsets = [own.live.offset_of(own.shards[key]) for key in _keys_of(tables, rank)]

    def own_part() -> OwnPart:
        # Ranks have different numbers of shards, but all records need one form.
        told = {"offsets": " ".join(map(str, offsets)), "size": str(own.live.bytes)}
        same = {"huge_pages": (str(huge_pages), SAME_PAGES)}
        return OwnPart(content_in_memory(own.live.storages()), told, same)

    def tables_of(page: _native.ControlPage, told: Sequence[Mapping[str, Any]]) -> FloatTables:
        places: dict[tuple[str, Shard], int] = {}
        sizes = [int(record["size"]) for record in told]
        for other, (record, size) in enumerate(zip(told, sizes, strict=True)):
            offsets = [int(offset) for offset in record["offsets"].split()]
            places |= _places(tables, other, offsets, size, dtype.itemsize)
        layouts = {table.name: table for table in tables}
        return FloatTables(page, digest, layouts, sizes, huge_pages, places, dtype, gpu=gpu)

    shared, generation = share_parts(rendezvous, group, digest, own_part, tables_of)
    assert isinstance(generation, FloatGeneration)
    pages = shared.own_pages(generation.parts[rank])
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
        if not 0 <= offset <= end <= size:
            _refuse(rank, f"a shard of table '{table}' at bytes {offset} to {end} of {size}")
    return dict(zip(keys, offsets, strict=True))


def _refuse(rank: int, what: str) -> NoReturn:
    raise RendezvousError(
        f"rank {rank} announced {what}. Install one version of torchrec-bls on all ranks"
    )
