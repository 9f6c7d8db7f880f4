"""A process that tests speak for, at the socket that others attach to."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_bls.direct.offers.listening import listen

DEADLINE = 30.0


@contextmanager
def answered(path: str, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Has a thread answer one connection at a path."""
    listener = listen(path)
    listener.settimeout(DEADLINE)

    def take_one() -> None:
        with listener.accept()[0] as connected:
            connected.settimeout(DEADLINE)
            answer(connected)

    thread = threading.Thread(target=take_one)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()
        Path(path).unlink()
