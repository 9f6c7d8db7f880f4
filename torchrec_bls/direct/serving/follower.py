"""Maps each new generation of a model's tables beside the one that is read."""

import atexit
import threading
import weakref
from collections.abc import Sequence

from torchrec_bls import _native
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import BLSError, named

# Seconds between two looks at the control page: after a new generation, after a quarter of a minute
# without one, and after looks that failed. A look every 5 ms takes up to 1 % of a processor.
_PAUSE = 0.005
_IDLE_PAUSE = 0.02
_GROWTH = 1.001
_LONGEST_PAUSE = 0.2
# Seconds that the thread may take to end; at the end of the process it leaves what it maps.
_ENDING = 5.0


class Follower:
    """Maps announced generations in a thread, so that lookups need not wait for that.

    The control page of the first module announces changes for all tables of a model. A generation
    is ready when all owners have announced it and all its segments are mapped.

    Args:
        tables: tables of each module of the model, in the same order in every process.
        serving: generation of each module that is read now.

    Attributes:
        newest: generation of each module that is ready; all have one number. A batch takes all of
            them, or none.
        problem: why a complete generation could not be mapped, or why a look failed otherwise;
            empty if there is none.
    """

    def __init__(self, tables: Sequence[SharedTables], serving: tuple[Generation, ...]) -> None:
        self._tables = list(tables)
        self.newest = serving
        self.problem = ""
        # Segments by module, owner and generation, until they belong to a generation: those that
        # this process made, and those mapped before another segment failed.
        self._segments: dict[tuple[int, int, int], _native.TableSegment] = {}
        self._released: list[Generation] = []
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
        _followers.add(self)

    def keep(self, owner: int, number: int, segments: Sequence[_native.TableSegment]) -> None:
        """Keeps the segments of a generation that this process made, one a module, until all is
        ready."""
        for module, segment in enumerate(segments):
            self._segments[module, owner, number] = segment

    def release(self, generations: Sequence[Generation]) -> None:
        """Makes the thread unmap generations that are not read any more, which takes a while."""
        self._released.extend(generations)

    def look(self) -> bool:
        """Maps what is complete and not mapped yet. Returns False if that failed."""
        self._released.clear()
        number = self._tables[0].page.complete
        if number <= self.newest[0].number:
            return True
        try:
            ready = [self._map(module, number) for module in range(len(self._tables))]
        except BLSError as error:
            # A slow process finds a newer generation at its next look.
            self.problem = f"generation {number}: {error}"
            return False
        self.newest, self.problem = tuple(ready), ""
        for key in list(self._segments):  # another thread may be keeping some
            if key[-1] <= number:
                del self._segments[key]
        return True

    def stop(self) -> None:
        """Ends the thread."""
        if self._stop.locked():
            self._stop.release()
        self._thread.join(_ENDING)

    def _map(self, module: int, number: int) -> Generation:
        tables = self._tables[module]
        segments = []
        for owner in range(tables.owners):
            key = module, owner, number
            if key not in self._segments:
                self._segments[key] = tables.open(owner, number)
            segments.append(self._segments[key])
        return tables.generation(number, segments)


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
        succeeded = follower.look()
    except Exception as error:
        follower.problem = named(error)
        return False
    if succeeded:
        follower.problem = ""
    return succeeded


def _stop_all() -> None:
    _native.end_work_beside_lookups()
    for follower in list(_followers):
        follower.stop()


_followers: "weakref.WeakSet[Follower]" = weakref.WeakSet()
# A thread that returns from native code after the interpreter's end aborts the process.
atexit.register(_stop_all)
