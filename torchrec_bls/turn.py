"""One thread at a time, whatever exception strikes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds between two looks of a thread that waits.
_PAUSE = 0.005


class Turn:
    """Lets one thread at a time through, in the order of their coming.

    A lock is taken in one step, and the code that gives it back is armed in the next one. A signal
    between the two leaves the lock taken for good. Here the code is armed before, and one store
    says who waits: leaving undoes that store, whether the turn had come or not.
    """

    def __init__(self) -> None:
        self._threads: dict[object, None] = {}

    @contextmanager
    def taken(self, end: float, busy: Exception) -> Iterator[None]:
        """Keeps other threads out.

        Args:
            end: end of the wait for them, in `time.monotonic()`.
            busy: error that is raised if they have not left by then.
        """
        own = object()
        try:
            self._threads[own] = None
            while next(iter(list(self._threads))) is not own:
                if time.monotonic() >= end:
                    raise busy
                time.sleep(_PAUSE)
            yield
        finally:
            self._threads.pop(own, None)
