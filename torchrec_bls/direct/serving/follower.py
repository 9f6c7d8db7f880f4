"""Maps each new version of a model's tables beside the one that is read."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from torchrec_bls import _native
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.process import Process, this_process
from torchrec_bls.direct.serving.readers import Reader
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import BLSError, PeerTimeoutError, named
from torchrec_bls.lifetime import Living, When, at_exit, do_all, new_lock, whole_at_forks

# Seconds between two looks at the control page: after a new generation, after a quarter of a minute
# without one, and after looks that failed. A look every 5 ms takes up to 1 % of a processor.
_PAUSE = 0.005
_IDLE_PAUSE = 0.02
_GROWTH = 1.001
_LONGEST_PAUSE = 0.2
# Seconds between two looks of a forward that waits for the thread.
_SHORT_PAUSE = 0.0005
# Seconds for which the thread leaves the interpreter to forwards, which else wait until it has
# mapped all of a version.
_GIVES_WAY = 1e-5
# Seconds that the thread may take to end; at the end of the process it leaves what it maps.
_ENDING = 5.0


class Follower:
    """Maps the version that serves in a thread, so that lookups need not wait for that.

    The control page of the first module says which one serves, for all tables of a model. It is
    ready when all its parts are mapped.

    Args:
        tables: tables of each module of the model, in the same order in every process.
        serving: generation of each module that is read now.
        settles: whether this process publishes. It then makes a version serve that all owners have
            announced, if the last of them died before it could.

    Attributes:
        newest: generation of each module that is ready; all are of one version. A batch takes all
            of them, or none.
        reader: this process among the readers of the tables.
        problem: why the version that serves could not be mapped, or why a look failed otherwise;
            empty if there is no reason.
        after_look: function that the thread calls after each look.
    """

    def __init__(
        self, tables: Sequence[SharedTables], serving: tuple[Generation, ...], settles: bool
    ) -> None:
        self._tables = list(tables)
        self._lead = self._tables[0].page
        self._settles = settles
        self.newest = serving
        self.problem = ""
        self.after_look: Callable[[], None] = nothing
        # Parts by module, owner, serial number and version, until they belong to a generation:
        # those that this process made, and those mapped before another one failed.
        self._parts: dict[tuple[int, int, int, str], OwnerPart] = {}
        self._released: list[Generation] = []
        # Serial number of the version for which the other sides were mapped last.
        self._prepared = 0
        for of_module, generation in zip(self._tables, serving, strict=True):
            of_module.held.add(generation.serial, generation.mappings)
        self._starting = new_lock()
        self._process: Process | None = None
        self.start()
        _followers.add(self)

    def start(self) -> None:
        """Starts the thread, unless it runs in this process already."""
        with self._starting:
            if self._process is not None and self._process.is_own:
                return
            process = this_process()
            self.reader = Reader(self._tables)
            self.reader.tell(self.newest[0].serial)
            # Free when the thread is to end.
            self._stop = threading.Lock()
            self._stop.acquire()
            # The thread keeps no reference, so that all of this is freed with the model.
            self._thread = threading.Thread(
                target=_follow,
                args=(weakref.ref(self), self._stop),
                name="torchrec_bls tables",
                daemon=True,
            )
            self._thread.start()
            self._process = process

    def keep(self, owner: int, serial: int, version: str, parts: Sequence[OwnerPart]) -> None:
        """Keeps the parts of a version that this process made, one a module, until all is
        ready. It drops those that the owner has withdrawn."""
        self.drop(owner, serial)
        for module, part in enumerate(parts):
            self._parts[module, owner, serial, version] = part

    def drop(self, owner: int, serial: int) -> None:
        """Drops the kept parts of an owner for a serial number."""
        for key in list(self._parts):
            if key[1:3] == (owner, serial):
                self._parts.pop(key, None)

    def release(self, generations: Sequence[Generation]) -> None:
        """Makes the thread unmap generations that are not read any more, which takes a while."""
        self._released.extend(generations)

    def pin(self, generation: Generation) -> _native.SidePin | None:
        """Pins the side of a generation; see Reader.pin."""
        assert generation.side is not None
        return self.reader.pin(generation.side, generation.serial)

    def await_later(self, serial: int, deadline: float) -> None:
        """Waits until a version later than `serial` is mapped.

        Raises:
            PeerTimeoutError: none is after `deadline` seconds.
        """
        end = time.monotonic() + deadline
        while self.newest[0].serial <= serial:
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"the version that serves can't be read here after version "
                    f"{self.newest[0].version!r}: {self.problem or 'it is still being mapped'}"
                )
            time.sleep(_SHORT_PAUSE)

    def look(self) -> bool:
        """Maps what is complete and not mapped yet. Returns False if that failed."""
        if self._released:
            self._unmap()
        self.reader.tell(self.newest[0].serial)
        version = ""
        try:
            if self._settles and self._tables[0].process.is_own:
                self._lead.settle()
            if self._lead.serial == self.newest[0].serial:
                if self._prepared != self.newest[0].serial:
                    self._map_other_sides()
                return True
            serial, version = self._lead.serving
            ready = [self._map(module, serial, version) for module in range(len(self._tables))]
        except BLSError as error:
            # A slow process finds a newer version at its next look.
            self.problem = f"version {version!r}: {error}" if version else str(error)
            return False
        self.problem, self.newest = "", tuple(ready)
        for key in list(self._parts):  # another thread may be keeping some
            if key[2] <= serial:
                self._parts.pop(key, None)
        return True

    def stop(self) -> None:
        """Ends the thread. A forked child that has not started its own has none."""
        if self._process is None or not self._process.is_own:
            return
        if self._stop.locked():
            self._stop.release()
        self._thread.join(_ENDING)

    @whole_at_forks()
    def _unmap(self) -> None:
        self._released.clear()

    @whole_at_forks()
    def _map_other_sides(self) -> None:
        """Maps what the next version is likely to read, once for each version."""
        self._prepared = self.newest[0].serial
        with suppress(BLSError):  # whoever reads it is told
            for tables, generation in zip(self._tables, self.newest, strict=True):
                tables.map_other_side(generation)

    @whole_at_forks()
    def _map(self, module: int, serial: int, version: str) -> Generation:
        tables = self._tables[module]
        parts = []
        for owner in range(tables.owners):
            key = module, owner, serial, version
            part = self._parts.get(key)
            if part is None:
                part = self._parts[key] = tables.open(owner, serial, version)
                time.sleep(_GIVES_WAY)
            parts.append(part)
        generation = tables.generation(version, serial, parts)
        time.sleep(_GIVES_WAY)
        # What shows one version after the other is held for the one that it shows last.
        tables.held.add(serial, [*generation.mappings, *tables.windows.all])
        return generation


def nothing() -> None:
    """Does nothing."""


def _follow(follower: "weakref.ref[Follower]", stop: threading.Lock) -> None:
    _native.work_beside_lookups()
    pause = _PAUSE
    while not stop.acquire(timeout=pause):
        followed = follower()
        if followed is None:
            return
        before = followed.newest
        if not _succeeds(followed):
            pause = min(2 * pause, _LONGEST_PAUSE)
        elif followed.newest is not before:
            pause = _PAUSE
        else:
            pause = min(_GROWTH * pause, _IDLE_PAUSE)
        del followed, before


def _succeeds(follower: Follower) -> bool:
    """Looks, whatever comes of it: the thread goes on as long as its model."""
    try:
        try:
            succeeded = follower.look()
        finally:
            follower.after_look()  # pins are let go, whatever a look raises
    except Exception as error:
        follower.problem = named(error)
        return False
    if succeeded:
        follower.problem = ""
    return succeeded


_followers: Living[Follower] = Living()


@at_exit(When.FOLLOWERS)
def _stop_all() -> None:
    do_all([_native.end_work_beside_lookups, *(follower.stop for follower in _followers)])
