"""The tables of a sharded module in shared memory, with a part for each rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch

from torchrec_bls import _native
from torchrec_bls.direct.arguments import DRAINED_VERSION
from torchrec_bls.direct.file_holders import holders_of, is_held
from torchrec_bls.direct.generation import Generation, side_of
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.held_versions import HeldVersions
from torchrec_bls.direct.layout import TableLayout
from torchrec_bls.direct.new_weights import CheckpointWeights
from torchrec_bls.direct.owner_part import HeldPiece, OwnerPart, check_is_file
from torchrec_bls.direct.part_index import Address, Label, other_side
from torchrec_bls.direct.pieces import Cut, Range
from torchrec_bls.direct.process import Process, is_alive, this_process
from torchrec_bls.direct.side_windows import SideWindows
from torchrec_bls.direct.steps import Content
from torchrec_bls.errors import BLSError, ProtocolError, RendezvousError
from torchrec_bls.huge_pages import HugePages


@dataclass(frozen=True)
class RowBlock:
    """Some rows of a table, or some columns of them, one after the other among an owner's bytes.

    Attributes:
        begin: place of the first byte.
        first_row: number of the first row in the table.
        rows: number of rows.
        first_byte: first byte of a stored row of the table that is here.
        row_bytes: bytes of each row that are here.
    """

    begin: int
    first_row: int
    rows: int
    first_byte: int
    row_bytes: int

    @property
    def end(self) -> int:
        """Returns the place after the last byte."""
        return self.begin + self.rows * self.row_bytes


@dataclass(frozen=True)
class SharedTables(ABC):
    """The facts that all versions of a module's tables share.

    Attributes:
        page: control page, which says which versions there are, and where.
        digest: digest of the layouts.
        layouts: layouts of the tables, by name.
        sizes: number of bytes of each owner's tables.
        huge_pages: what new segments ask for, see huge_pages_for.
        gpu: GPU that reads the tables for this process; None: the CPU does.
        process: process that shared the tables or attached to them. A child that it forks reads
            them, and can't write to the page.
        held: versions that this process has in memory.
        windows: windows of tables that are refreshed by row, in this process.
        open_pieces: pieces of other processes that are mapped here, by device, inode and label. As
            long as one is mapped, no other file has its inode.
    """

    page: _native.ControlPage
    digest: bytes
    layouts: Mapping[str, TableLayout]
    sizes: Sequence[int]
    huge_pages: HugePages
    gpu: Gpu | None = field(default=None, kw_only=True)
    process: Process = field(default_factory=this_process, kw_only=True)
    held: HeldVersions = field(default_factory=HeldVersions, kw_only=True)
    windows: SideWindows = field(default_factory=SideWindows, kw_only=True)
    open_pieces: "WeakValueDictionary[tuple[object, ...], _native.TableSegment]" = field(
        default_factory=WeakValueDictionary, kw_only=True
    )

    @property
    def owners(self) -> int:
        """Returns the number of ranks that have tables."""
        return len(self.sizes)

    @cached_property
    def cuts(self) -> list[Cut]:
        """Returns the pieces of each owner's bytes."""
        return [
            Cut.of(self.ranges(owner), size, self.huge_pages)
            for owner, size in enumerate(self.sizes)
        ]

    def create(
        self,
        owner: int,
        version: str,
        content: Content,
        dense: Mapping[str, Any] | None,
        before: Mapping[int, HeldPiece],
        trained: float | None = None,
    ) -> OwnerPart:
        """Makes an owner's part of a version.

        Args:
            owner: rank that owns it.
            version: name of the version.
            content: content of the owner's bytes. Each step is read once.
            dense: weights of the version that are published with the tables, by name.
            before: the owner's pieces of another version by number, which stay if they have the
                same content.
            trained: see Facts.

        Raises:
            RendezvousError: there is no memory for it.
            ValueError: the content is not possible.
        """
        label = Label(owner, version, self.digest)
        cut, huge_pages = self.cuts[owner], self.huge_pages
        return OwnerPart.make(label, cut, content, dense, before, huge_pages, trained)

    def open(self, owner: int, serial: int, version: str) -> OwnerPart:
        """Maps the part that an owner has recorded for a version, whichever process holds it.

        Args:
            owner: rank that owns it.
            serial: serial number of the version.
            version: name of the version.

        Raises:
            BLSError: no process holds all of it any more, or it has another label or size, or
                the owner has recorded something else.
        """
        recorded, address = self.page.recorded(owner, serial) or ("", None)
        if address is None or recorded != version:
            raise ProtocolError(
                f"rank {owner} has announced version {version!r}, but not tables "
                f"{sorted(self.layouts)} of it: publish the same model on every rank"
            )
        return self.part_at(owner, version, address)

    def part_at(self, owner: int, version: str, address: Address) -> OwnerPart:
        """Maps the part of an owner whose index is at an address; see `open`."""
        label = Label(owner, version, self.digest)
        [index] = _open_all([address], [label])
        return OwnerPart.of(label, index, self.cuts[owner], self._open_pieces)

    def _open_pieces(
        self, addresses: Sequence[Address], labels: Sequence[Label]
    ) -> list[_native.TableSegment]:
        """Maps pieces as `_open_all` does, but for those that this process has mapped already."""
        keys = [(*address[2:4], *label) for address, label in zip(addresses, labels, strict=True)]
        found = [self.open_pieces.get(key) for key in keys]
        missing = [number for number, segment in enumerate(found) if segment is None]
        opened = _open_all(
            [addresses[each] for each in missing], [labels[each] for each in missing]
        )
        for number, segment in zip(missing, opened, strict=True):
            self.open_pieces[keys[number]] = found[number] = segment
        return [segment for segment in found if segment is not None]

    def adopt(
        self, owner: int, version: str, descriptors: Callable[[], int], where: str
    ) -> OwnerPart:
        """Maps the part of an owner in a version, by descriptors that stay the caller's.

        Args:
            owner: rank that owns it.
            version: name of the version.
            descriptors: function that returns the next descriptor: of the index, and then of the
                pieces by number.
            where: place that they came from, for messages.

        Raises:
            BLSError: they are of no sealed memory, or of another label or size, or the index lists
                other pieces.
        """

        def adopt_all(
            addresses: Sequence[Address], labels: Sequence[Label]
        ) -> list[_native.TableSegment]:
            segments = []
            for address, label in zip(addresses, labels, strict=True):
                descriptor = descriptors()
                segments.append(_native.TableSegment.adopt(descriptor, label))
                check_is_file(descriptor, address, where)
            return segments

        label = Label(owner, version, self.digest)
        index = _native.TableSegment.adopt(descriptors(), label)
        return OwnerPart.of(label, index, self.cuts[owner], adopt_all)

    @abstractmethod
    def ranges(self, owner: int) -> list[Range]:
        """Returns where the rows of each table begin and end among an owner's bytes."""

    def content(self, owner: int, prefix: str, state_dict: Mapping[str, Any]) -> Content:
        """Returns the content of an owner's bytes from a state dict. It is read step by step,
        later. What a caller can get wrong about names, shapes and dtypes is checked before.

        Args:
            owner: rank that owns them.
            prefix: prefix of the tables' names in the state dict.
            state_dict: the state dict.

        Raises:
            ValueError: a table is missing, or has a wrong shape or dtype; or a checkpoint has more
                tables.
        """
        if isinstance(state_dict, CheckpointWeights):
            state_dict.check_has_no_more(prefix, self.layouts.keys())
        return self._content(owner, prefix, state_dict)

    @abstractmethod
    def _content(self, owner: int, prefix: str, state_dict: Mapping[str, Any]) -> Content:
        """See `content`."""

    @property
    @abstractmethod
    def given_dtypes(self) -> Sequence[torch.dtype]:
        """Returns the dtypes of which new rows may be."""

    @abstractmethod
    def stored(self, table: str, rows: torch.Tensor) -> torch.Tensor:
        """Returns new rows of a table as they are stored, uint8 [rows, bytes].

        Args:
            table: name of the table.
            rows: the rows, [rows, columns], of one of `given_dtypes`.
        """

    @abstractmethod
    def row_blocks(self, table: str) -> Sequence[RowBlock]:
        """Returns where the rows of a table lie, if one owner has all tables."""

    def drained(self, owner: int, version: str) -> OwnerPart:
        """Makes an owner's part of the version without rows, see OwnerPart.drained."""
        return OwnerPart.drained(Label(owner, DRAINED_VERSION, self.digest), version)

    def generation(self, version: str, serial: int, parts: Sequence[OwnerPart]) -> Generation:
        """Returns the generation that consists of the parts of all owners. What lookups read of it
        is mapped, and registered with the GPU that reads it.

        Raises:
            BLSError: it can't be mapped, or not be registered.
        """
        if side_of(parts) is None:
            self.windows.forget()
        if any(part.drained_for for part in parts):
            return Generation(version, serial, parts, [])
        generation = self._generation(version, serial, parts)
        if self.gpu is not None:
            if not self.process.is_own:
                raise RendezvousError(
                    f"process {self.process.pid} has forked this one, where its GPU can't be used: "
                    "attach in a process that is started by spawn or forkserver"
                )
            self._register(generation, self.gpu)
        return generation

    def _register(self, generation: Generation, gpu: Gpu) -> None:
        if generation.side is None:
            generation.register_with(gpu)
        else:
            window, pages = generation.window, generation.pages
            generation.registered = self.windows.registered(window, pages, gpu)

    def map_other_side(self, generation: Generation) -> None:
        """Maps the copies that the next version reads if it differs in rows, and registers them
        with the GPU that reads them, so that nobody waits for that then.

        Raises:
            BLSError: they can't be mapped, or not be registered.
        """
        if generation.side is None:
            return
        others = [address for part in generation.parts for address in part.others.values()]
        if not self.windows.shows(other_side(generation.side), {each[2:4] for each in others}):
            parts = [
                part.on_other_side(cut, self._open_pieces)
                for part, cut in zip(generation.parts, self.cuts, strict=True)
            ]
            # No lookup reads it. Its window is kept.
            other = self._generation(generation.version, generation.serial, parts)
            if self.gpu is not None:
                self._register(other, self.gpu)
            self.held.add(generation.serial, self.windows.all)

    @abstractmethod
    def _generation(self, version: str, serial: int, parts: Sequence[OwnerPart]) -> Generation:
        """See `generation`. All parts have rows."""

    @abstractmethod
    def check_places(self) -> None:
        """Raises ProtocolError if something does not lie among the bytes of its owner."""

    def owners_gone(self) -> list[int]:
        """Returns the owners that no living process publishes for. Their tables are still
        served."""
        return [owner for owner in range(self.owners) if not is_alive(self.page.process(owner))]


def _open_all(addresses: Sequence[Address], labels: Sequence[Label]) -> list[_native.TableSegment]:
    """Maps files that other processes have announced, whichever process holds them now.

    Raises:
        BLSError: no process holds one of them any more, or it has another label. Or this process
            can't look.
    """
    segments: dict[int, _native.TableSegment] = {}
    # An exception among them would keep itself, and all that its callers have.
    lost: list[int] = []
    for number, (address, label) in enumerate(zip(addresses, labels, strict=True)):
        try:
            segments[number] = _native.TableSegment.open(address, label)
        except BLSError:
            if is_held(*address[:4]):
                raise
            lost.append(number)
    if lost:
        try:
            holders = holders_of(addresses[number][2:4] for number in lost)
        except OSError as error:
            raise RendezvousError(
                f"cannot look for the tables that other processes have announced: {error}. Raise "
                "the limit of open files (ulimit -n)"
            ) from error
        for number in lost:
            *place, device, inode, size = addresses[number]
            # One that nobody holds fails again.
            found = holders.get((device, inode), place)
            address = (*found, device, inode, size)
            segments[number] = _native.TableSegment.open(address, labels[number])
    return [segments[number] for number in range(len(addresses))]
