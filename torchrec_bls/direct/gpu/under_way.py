"""What outlasts a forward of which a GPU reads the rows: the pin of its version, and the check of
its ids."""

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from torchrec_bls.direct.gpu.capture import capture_here
from torchrec_bls.direct.gpu.cuda import Event
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.reader import Launch
from torchrec_bls.direct.gpu.report import first_bad_id
from torchrec_bls.lifetime import Living, When, at_exit, do_all, in_forked_child, new_lock


class LateBadId(NamedTuple):
    """The first bad id of a batch, found by the GPU after its forward had returned.

    Attributes:
        batch: number of the batch among those of the module, counted from 1.
        version: version that it was looked up in.
        key: feature of the id.
        position: its place among the ids of the batch; None: the lengths of the feature do not fit
            the ids.
        id: the id.
    """

    batch: int
    version: str
    key: str
    position: int | None
    id: int


class _Check(NamedTuple):
    """Launches whose reports nobody has read.

    Attributes:
        launches: the launches of one batch.
        batch: see LateBadId.
        version: see LateBadId.
        keys: keys of the batch.
        ids: number of its ids.
    """

    launches: Sequence[Launch]
    batch: int
    version: str
    keys: Sequence[str]
    ids: int

    def is_done(self) -> bool:
        """Returns whether the GPU has checked the batch."""
        return self.launches[-1].is_done()  # in the order of the stream for reads


class CapturedLookup(NamedTuple):
    """Reads of a batch that each replay does again.

    Attributes:
        under_way: forwards of their module.
        launches: launches, whose reports are on the GPU: each replay writes them anew.
        keys: keys of the batch.
        ids: number of its ids.
    """

    under_way: "ForwardsUnderWay"
    launches: Sequence[Launch]
    keys: Sequence[str]
    ids: int


class ForwardsUnderWay:
    """The forwards of a module of which a GPU may still read the rows, in any number of threads.

    Args:
        gpu: the GPU.

    Attributes:
        gpu: see above.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._numbers = count(1)
        # In the order of the stream for reads, so that the first one ends first.
        self._pins: deque[tuple[Event, object]] = deque()
        self._checks: deque[_Check] = deque()
        self._bad: deque[LateBadId] = deque()
        self._lock = new_lock()
        _all.add(self)

    def next_batch(self) -> int:
        """Returns the number of a batch that is about to be looked up."""
        return next(self._numbers)

    def check_later(
        self,
        launches: Sequence[Launch],
        batch: int,
        version: str,
        keys: Sequence[str],
        ids: int,
    ) -> None:
        """Notes a batch whose ids the GPU checks. In a forward that is captured, the ids are those
        of each replay.

        Args:
            launches: launches that read its rows.
            batch: number of the batch.
            version: version that it reads.
            keys: keys of the batch.
            ids: number of its ids.
        """
        capture = capture_here()
        if capture is not None and capture.is_running:
            capture.lookups.append(CapturedLookup(self, launches, keys, ids))
        elif launches:
            self._checks.append(_Check(launches, batch, version, keys, ids))

    def keep(self, pin: object) -> None:
        """Keeps a pin until the GPU has read what was launched before. A forward that is captured
        reads nothing: each replay has a pin of its own."""
        if _is_captured():
            return
        self._pins.append((self.gpu.mark(), pin))

    def let_go(self) -> None:
        """Lets go of the pins of what the GPU has read by now, and reads its reports. It waits for
        nothing."""
        with self._lock:
            while self._pins and self._pins[0][0].query():
                self._pins.popleft()
            while self._checks and self._checks[0].is_done():
                self._read_report(self._checks[0])
                self._checks.popleft()

    def wait(self) -> None:
        """Waits until the GPU has checked the ids of all forwards that have returned."""
        for check in list(self._checks):
            check.launches[-1].wait()

    def next_bad_id(self) -> LateBadId | None:
        """Returns the bad id of a batch that the GPU is done with, each batch once; None if there
        is none, or if the caller is captured: nothing is known of its batches."""
        if _is_captured():
            return None
        if self._checks:
            self.let_go()
        with self._lock:
            return self._bad.popleft() if self._bad else None

    def _read_report(self, check: _Check) -> None:
        found = [first_bad_id(launch.report) for launch in check.launches]
        bad = min(filter(None, found), key=lambda each: each.position, default=None)
        if bad is not None:
            position = bad.position if bad.position < check.ids else None
            key = check.keys[bad.key]
            self._bad.append(LateBadId(check.batch, check.version, key, position, bad.id))

    def _end(self) -> None:
        for done, _ in list(self._pins):
            done.synchronize()
        self.let_go()

    def _forget(self) -> None:
        self._pins.clear()
        self._checks.clear()
        self._bad.clear()


def _is_captured() -> bool:
    capture = capture_here()
    return capture is not None and capture.is_running


_all: Living[ForwardsUnderWay] = Living()


@in_forked_child
def _forget_all() -> None:
    do_all(each._forget for each in _all)  # they are the parent's, and CUDA can't be asked here


@at_exit(When.FOLLOWERS)
def _end_all() -> None:
    # No thread lets pins go any more, and the process may wait long for its children.
    do_all([each._end for each in _all])
