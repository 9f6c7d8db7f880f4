"""The tables of a sharded module in shared memory, with one segment for each rank."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torchrec_bls import _native
from torchrec_bls.direct.dense_weights import Parts, dense_parts, dense_weights
from torchrec_bls.direct.file_holders import holder_of, is_held
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.held_versions import HeldVersions
from torchrec_bls.direct.layout import TableLayout
from torchrec_bls.direct.process import Process, is_alive, this_process
from torchrec_bls.errors import BLSError, ProtocolError, RendezvousError


@dataclass(frozen=True)
class SharedTables(ABC):
    """The facts that all versions of a module's tables share.

    Attributes:
        page: control page, which says which versions there are, and where.
        digest: digest of the layouts.
        layouts: layouts of the tables, by name.
        sizes: bytes of the tables in the segments, by owner. Dense weights may follow the tables.
        huge_pages: whether new segments ask for pages of 2 MiB.
        process: process that shared the tables or attached to them. A child that it forks reads
            them, and can't write to the page.
        held: versions that this process has in memory.
    """

    page: _native.ControlPage
    digest: bytes
    layouts: Mapping[str, TableLayout]
    sizes: Sequence[int]
    huge_pages: bool
    process: Process = field(default_factory=this_process, kw_only=True)
    held: HeldVersions = field(default_factory=HeldVersions, kw_only=True)

    @property
    def owners(self) -> int:
        """Returns the number of ranks that have tables."""
        return len(self.sizes)

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
            parts: contiguous tensors, and their places in the segment, in bytes. They are copied
                one after the other.
            dense: weights of the version that are published with the tables, by name.

        Raises:
            RendezvousError: there is no memory for the segment.
        """
        behind: Parts = ()
        size = self.sizes[owner]
        if dense is not None:
            behind, size = dense_parts(dense, size)
        return _native.TableSegment.create(
            (owner, version, self.digest),
            chain(parts, behind),
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

    @abstractmethod
    def parts(self, owner: int, prefix: str, state_dict: Mapping[str, Any]) -> Parts:
        """Returns the content of an owner's next segment from a state dict: contiguous tensors and
        their places, in bytes. They may be made one by one, while the segment is filled. What a
        caller can get wrong is checked before.

        Args:
            owner: rank that owns the segment.
            prefix: prefix of the tables' names in the state dict.
            state_dict: the state dict.

        Raises:
            ValueError: a table is missing, or has a wrong shape or dtype.
        """

    @abstractmethod
    def generation(
        self, version: str, serial: int, segments: Sequence[_native.TableSegment]
    ) -> Generation:
        """Returns the generation that consists of the segments of all owners. What lookups read of
        it is mapped.

        Raises:
            BLSError: it can't be mapped.
        """

    @abstractmethod
    def check_places(self) -> None:
        """Raises ProtocolError if something does not lie in the segment of its owner."""

    def owners_gone(self) -> list[int]:
        """Returns the owners that no living process publishes for. Their tables are still
        served."""
        return [owner for owner in range(self.owners) if not is_alive(self.page.process(owner))]


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
