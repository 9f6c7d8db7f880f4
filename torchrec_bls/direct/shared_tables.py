"""The tables of a sharded module in shared memory, with one segment for each rank."""

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.dense_weights import Parts, dense_parts, dense_weights
from torchrec_bls.direct.file_holders import holder_of, is_held
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.process import Process, is_alive, this_process
from torchrec_bls.errors import BLSError, ProtocolError, RendezvousError

# Serial number of the version that the first forward makes.
_FIRST_SERIAL = 1


@dataclass(frozen=True)
class SharedTables:
    """The facts that all versions of a module's tables share.

    Attributes:
        page: control page, which says which versions there are, and where.
        digest: digest of the layouts.
        layouts: layouts of the tables, by name.
        offsets: places of the shards in the segments of their owners, in bytes.
        sizes: bytes of the tables in the segments, by owner. Dense weights may follow the tables.
        dtype: dtype of the weights.
        huge_pages: whether new segments ask for pages of 2 MiB.
        process: process that shared the tables or attached to them. A child that it forks reads
            them, and can't write to the page.
    """

    page: _native.ControlPage
    digest: bytes
    layouts: Mapping[str, TableLayout]
    offsets: Mapping[tuple[str, Shard], int]
    sizes: Sequence[int]
    dtype: torch.dtype
    huge_pages: bool
    process: Process = field(default_factory=this_process)

    @property
    def owners(self) -> int:
        """Returns the number of ranks that have tables."""
        return len(self.sizes)

    def shards_of(self, owner: int) -> Iterator[tuple[TableLayout, Shard]]:
        """Yields the shards that have rows and columns."""
        for layout in self.layouts.values():
            for shard in layout.shards:
                if shard.owner == owner and shard.rows * shard.columns:
                    yield layout, shard

    def create(
        self,
        owner: int,
        version: str,
        parts: Parts,
        dense: Mapping[str, Any] | None = None,
    ) -> _native.TableSegment:
        """Makes the segment of an owner in a version.

        Args:
            owner: rank that owns the segment.
            version: name of the version.
            parts: contiguous tensors, and their places in the segment, in bytes.
            dense: weights of the version that are published with the tables, by name.

        Raises:
            RendezvousError: there is no memory for the segment.
        """
        behind: Parts = []
        size = self.sizes[owner]
        if dense is not None:
            behind, size = dense_parts(dense, size)
        return _native.TableSegment.create(
            (owner, version, self.digest),
            parts + behind,
            size,
            self.huge_pages,
        )

    def dense_weights(self, owner: int, segment: _native.TableSegment) -> dict[str, Any] | None:
        """Returns the dense weights that were published with an owner's tables, or None.

        Raises:
            ProtocolError: the bytes after the tables are something else.
        """
        try:
            return dense_weights(segment, self.sizes[owner])
        except ValueError as error:
            raise ProtocolError(
                f"the tables of rank {owner} take {self.sizes[owner]} bytes, but what was "
                f"announced has {segment.size}, which are no dense weights ({error}): install one "
                "version of torchrec-bls everywhere"
            ) from error

    def open(self, owner: int, serial: int, version: str) -> _native.TableSegment:
        """Maps the segment that an owner has recorded for a version, whichever process holds it.

        Args:
            owner: rank that owns the segment.
            serial: serial number of the version.
            version: name of the version.

        Raises:
            BLSError: no process holds the segment any more, or it has another label or size, or
                the owner has recorded something else.
        """
        recorded, address = self.page.recorded(owner, serial) or ("", None)
        if address is None or recorded != version:
            raise ProtocolError(
                f"rank {owner} has announced version {version!r}, but not tables "
                f"{sorted(self.layouts)} of it: publish the same model on every rank"
            )
        label = (owner, version, self.digest)
        try:
            segment = _native.TableSegment.open(address, label)
        except BLSError:
            elsewhere = _elsewhere(address)
            if elsewhere is None:
                raise
            segment = _native.TableSegment.open(elsewhere, label)
        return self.checked(owner, segment)

    def adopt(self, owner: int, version: str, descriptor: int) -> _native.TableSegment:
        """Maps the segment of an owner in a version, by a descriptor that stays the caller's.

        Raises:
            BLSError: it is no sealed memory, or it has another label or size.
        """
        label = (owner, version, self.digest)
        return self.checked(owner, _native.TableSegment.adopt(descriptor, label))

    def checked(self, owner: int, segment: _native.TableSegment) -> _native.TableSegment:
        """Returns `segment`. Raises ProtocolError unless it is as long as its tables, with the
        dense weights after them if there are any."""
        if segment.size < self.sizes[owner]:
            raise ProtocolError(
                f"the tables of rank {owner} take {self.sizes[owner]} bytes, but what was "
                f"announced has {segment.size}: install one version of torchrec-bls everywhere"
            )
        self.dense_weights(owner, segment)
        return segment

    def check_places(self) -> None:
        """Raises ProtocolError if a shard does not lie in the segment of its owner."""
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

    def generation(
        self, version: str, serial: int, segments: Sequence[_native.TableSegment]
    ) -> Generation:
        """Returns the generation that consists of the segments of all owners."""
        item_bytes = self.dtype.itemsize
        return Generation(version, serial, segments, self.offsets, self.layouts, item_bytes)

    def owners_gone(self) -> list[int]:
        """Returns the owners that no living process publishes for. Their tables are still
        served."""
        return [owner for owner in range(self.owners) if not is_alive(self.page.process(owner))]


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
) -> tuple[SharedTables, Generation]:
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
    digest = digest_of(tables)
    with rendezvous.own_part():
        segment = _native.TableSegment.create(
            (group.rank(), FIRST_VERSION, digest),
            own.live.storages(),
            own.live.segment_bytes,
            huge_pages,
        )
        page = _native.ControlPage.create(group.size(), digest) if group.rank() == 0 else None
    offsets = [own.live.offset_of(own.shards[key]) for key in _keys_of(tables, group.rank())]
    # Ranks have different numbers of shards, but all records need one form.
    own_offsets = " ".join(map(str, offsets))
    record = {
        "address": segment.address,
        "offsets": own_offsets,
        "page": page.address if page is not None else [0] * 5,
    }
    records = rendezvous.exchange("tables", record)
    segments: list[_native.TableSegment] = []
    places: dict[tuple[str, Shard], int] = {}
    with rendezvous.own_part():
        if page is None:
            page = _native.ControlPage.open(tuple(records[0]["page"]), group.size(), digest)
        for rank, told_by in enumerate(records):
            label = (rank, FIRST_VERSION, digest)
            segments.append(
                segment
                if rank == group.rank()
                else _native.TableSegment.open(tuple(told_by["address"]), label)
            )
            told = [int(offset) for offset in told_by["offsets"].split()]
            places |= _places(tables, rank, told, segments[-1].size, dtype.itemsize)
        page.take_over(group.rank(), 0, this_process().identity)
        page.record(group.rank(), _FIRST_SERIAL, FIRST_VERSION, segment.address)
        page.announce(group.rank(), _FIRST_SERIAL)
    rendezvous.exchange("mapped", {})
    own.live.move_to(_native.PrivatePages(segment))
    # They end with the module. So nobody can publish here any more.
    end = weakref.finalize(own.live, _abandon, page, group.rank(), this_process().identity)
    end.atexit = False
    layouts = {table.name: table for table in tables}
    sizes = [each.size for each in segments]
    shared = SharedTables(page, digest, layouts, places, sizes, dtype, huge_pages)
    return shared, shared.generation(FIRST_VERSION, _FIRST_SERIAL, segments)


def agree_on_direct_reads(
    group: dist.ProcessGroup, name: str, deadline: float, reason: str, session: str = ""
) -> str:
    """Returns why the ranks can't read tables directly, the same on all; empty if they can.

    Args:
        group: the module's ranks.
        name: name of the module.
        deadline: seconds to wait for the other ranks.
        reason: reason why this rank can't; empty if it can.
        session: session of the module's agreement.
    """
    refusal, apart = find_obstacles(group, name, deadline, reason, session)
    return refusal or apart


def find_obstacles(
    group: dist.ProcessGroup, name: str, deadline: float, reason: str, session: str = ""
) -> tuple[str, str]:
    """Returns which rank has a reason not to read tables directly, and which ranks are on different
    hosts; each is empty if there is none. The arguments are those of `agree_on_direct_reads`."""
    rendezvous = Rendezvous(group, f"{name} direct reads", deadline, session=session)
    records = rendezvous.exchange("possible", {"reason": reason, "host": this_process().host})
    reasons = [(rank, record["reason"]) for rank, record in enumerate(records) if record["reason"]]
    names = rendezvous.names
    refusal = f"{names.of(reasons[0][0])}: {reasons[0][1]}" if reasons else ""
    hosts = [record["host"] for record in records]
    if len(set(hosts)) == 1:
        return refusal, ""
    other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
    apart = names.of_all([0, other])
    return refusal, f"{apart} are on different hosts, or in different PID or user namespaces"


def warn_of_exchange(group: dist.ProcessGroup, name: str, reason: str) -> None:
    """Says once, on rank 0, that a module exchanges with lookup="auto". All ranks know the same.

    Args:
        group: the module's ranks.
        name: name of the module.
        reason: what `agree_on_direct_reads` has returned.
    """
    if group.rank() == 0:
        warnings.warn(
            f'{name}: lookup="auto" exchanges ids and embeddings, and ranks wait for each other. '
            f'{reason}. lookup="direct" refuses instead, and lookup="exchange" is silent',
            stacklevel=3,
        )


def _abandon(page: _native.ControlPage, rank: int, identity: int) -> None:
    if identity == this_process().identity:  # not in a fork, whose parent may go on
        page.abandon(rank)


def _elsewhere(
    address: tuple[int, int, int, int, int],
) -> tuple[int, int, int, int, int] | None:
    """Returns the address of the same file in another process; None if it is where it was recorded,
    or nowhere any more.

    Raises:
        RendezvousError: this process can't look.
    """
    pid, descriptor, device, inode, size = address
    if is_held(pid, descriptor, device, inode):
        return None
    try:
        holder = holder_of(device, inode)
    except OSError as error:
        raise RendezvousError(
            f"cannot look for the tables that process {pid} has announced: {error}. Raise the "
            "limit of open files (ulimit -n)"
        ) from error
    return None if holder is None else (*holder, device, inode, size)


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
