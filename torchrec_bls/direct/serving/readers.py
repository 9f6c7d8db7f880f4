"""The processes that read a model's tables, by the slots that they have on its control page."""

import time
from collections.abc import Sequence

from torchrec_bls import _native
from torchrec_bls.direct.part_index import Side
from torchrec_bls.direct.process import is_alive, pid_of, this_process
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import BLSError, RendezvousError

# Seconds between two tries to get a slot. Each may have to look at all readers.
_REST = 2.0


class Reader:
    """This process as one of the readers of a model's tables. It belongs to the process that has
    made it.

    Its slot says which version is the oldest one that this process has in memory. It is given back
    when this object is freed, and free when the process is dead.

    Args:
        tables: tables of each module of the model. The control page of the first one has the slots.
    """

    def __init__(self, tables: Sequence[SharedTables]) -> None:
        self._tables = list(tables)
        self._page: _native.ControlPage | None = None
        self._slot: _native.ReaderSlot | None = None
        self._told = 0
        self._next_try = 0.0

    @property
    def is_counted(self) -> bool:
        """Returns whether this process has a slot. It has none if living processes have them all,
        or if it has no descriptor left to map the page."""
        return self._slot is not None

    def tell(self, newest: int) -> None:
        """Writes into the slot which version is the oldest one here. One thread at a time calls it.

        Args:
            newest: serial number of the newest version that is mapped.
        """
        oldest = min(tables.held.oldest(newest) for tables in self._tables)
        if self._slot is not None:
            if oldest != self._told:
                self._slot.tell(oldest)
                self._told = oldest
        elif time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + _REST
            self._slot, self._told = self._take_slot(oldest), oldest

    def pin(self, side: Side, serial: int) -> _native.SidePin | None:
        """Pins a side of the tables. As long as the pin is referred to, the side has this version.

        Args:
            side: the side.
            serial: serial number of the version.

        Returns:
            None if the side has another version by now, or is being written to: then a later one
            serves.

        Raises:
            RendezvousError: this process has no slot to pin with.
            ValueError: it was forked from the one that the slot belongs to.
        """
        slot = self._slot
        if slot is None:
            raise RendezvousError(
                "this process can't read tables that are refreshed by row: it is not among the "
                "readers that their owner waits for, because 256 others are or because it has no "
                "descriptor left (ulimit -n)"
            )
        return slot.pin(side, serial)

    def _take_slot(self, oldest: int) -> _native.ReaderSlot | None:
        try:
            if self._page is None:
                self._page = _writable_page(self._tables[0])
            identity = this_process().identity
            return _native.ReaderSlot.take(self._page, identity, oldest, is_alive)
        except BLSError:  # it is only counted
            return None


def readers_of(page: _native.ControlPage) -> dict[int, int]:
    """Returns the living processes that read, by their numbers: the serial number of the oldest
    version that each of them has in memory. A process may read several models with these tables."""
    oldest: dict[int, int] = {}
    for identity, serial in page.readers():
        if is_alive(identity):
            pid = pid_of(identity)
            oldest[pid] = min(serial, oldest.get(pid, serial))
    return oldest


def holders_of_side(page: _native.ControlPage, side: Side) -> list[int]:
    """Returns the numbers of the living processes that have pinned a side."""
    return sorted({pid_of(each) for each in page.holders(side) if is_alive(each)})


def processes_told(pids: Sequence[int]) -> str:
    """Returns numbers of processes for a message, which says if one is this process."""
    own = this_process().pid
    return " and ".join(f"{pid} (this one)" if pid == own else f"{pid}" for pid in pids)


def _writable_page(tables: SharedTables) -> _native.ControlPage:
    """Returns the control page of tables. A forked child has to map it anew to write to it."""
    if tables.process.is_own:
        return tables.page
    return _native.ControlPage.adopt(tables.page.descriptor, tables.owners, tables.digest)
