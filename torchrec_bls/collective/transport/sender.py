"""Sends on its own thread, for threads that must not block."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

# Seconds between two looks at whether the thread still makes calls.
_PAUSE = 0.002

#: Starts a thread that does something, under a name.
Start = Callable[[Callable[[], None], str], threading.Thread]


class Sender:
    """Makes calls of gloo that send, in order, on a thread of its own. None of them waits.

    The kernel may take the processor from a thread that has computed for a while, even while it
    holds a connection's lock. gloo's own thread then spins for that lock until its time slice
    ends: that was 2 to 5 ms of an exchange after 1.5 ms of computing, with a core for each rank. A
    thread that has just woken up keeps the processor.

    After a call that fails it makes no more: receivers count messages by their order.

    Args:
        start: starts threads.
        failed: told why a call has failed.
    """

    def __init__(self, start: Start, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = start(self._make_calls, "sends")

    def put(self, call: Callable[[], None]) -> None:
        """Makes a call soon."""
        self._calls.put(call)

    def drain(self, seconds: float) -> None:
        """Waits until all calls so far are made, or one has failed."""
        made, end = threading.Event(), time.monotonic() + seconds
        self._calls.put(made.set)
        while not made.wait(_PAUSE) and self._thread.is_alive() and time.monotonic() < end:
            pass

    def stop(self, seconds: float) -> None:
        """Makes the remaining calls and ends the thread."""
        self._calls.put(None)
        self._thread.join(seconds)

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # whatever it is, peers wait for what was not sent
                self._failed(f"cannot send: {error}")
                return
