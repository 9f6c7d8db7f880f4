"""The process that keeps a service's tables, and its successors."""

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from torch import nn

from torchrec_bls.errors import named
from torchrec_bls.serve.processes.background import give_way
from torchrec_bls.serve.processes.leaving import leave
from torchrec_bls.serve.processes.names import name_process
from torchrec_bls.serve.status import Refreshes

# Seconds that a keeper may take to load its first version, and to end.
_LOADING, _ENDING = 3600.0, 30.0
# Seconds between the end of a keeper and the next one, doubled each time up to the longest.
_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
# Seconds between two looks at what it watches.
_LOOK = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keeping:
    """What a keeper keeps.

    Attributes:
        build: function that returns the model; it can be imported.
        checkpoint: path of its first checkpoint.
        path: path of the socket that readers attach at.
        watch: directory whose new checkpoints are published, or None.
        drain: whether a version is let go of before the next one is made.
        dense_columns: number of the model's dense features; None: it is found.
    """

    build: Callable[[], nn.Module]
    checkpoint: str
    path: str
    watch: str | None
    drain: bool
    dense_columns: int | None


class KeeperProcess:
    """Runs a keeper beside this process, and another one when it ends, which takes the tables over
    from this process. It is a context manager.

    Args:
        keeping: what it keeps.

    Attributes:
        refreshes: what became of new checkpoints.
        has_tables: whether the tables have been loaded.
    """

    def __init__(self, keeping: Keeping) -> None:
        self.refreshes = Refreshes()
        self.has_tables = False
        self._began = time.monotonic()
        self._keeping = keeping
        self._pause = _PAUSE
        self._next = 0.0
        self._start()

    def __enter__(self) -> "KeeperProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> None:
        """Takes what the keeper says, and begins another one if it has ended.

        Raises:
            RuntimeError: the first one has ended, or can't load the tables; the text says why.
        """
        while self._connection.poll():
            message = self._receive()
            if message is None:
                break
            problem = self._take(message)
            if problem and not self.has_tables:
                raise RuntimeError(f"the tables can't be loaded: {problem}")
            if problem:
                _log.warning("the tables can't be taken over: %s", problem)
        now = time.monotonic()
        if self._process.is_alive():
            if not self.has_tables and now > self._began + _LOADING:
                raise RuntimeError(
                    f"the tables were not loaded within {_LOADING:g} s: give tables that take less "
                    "long, or a faster disk"
                )
            return
        if not self.has_tables:
            raise RuntimeError(
                "the process that keeps the tables has ended before they were loaded, with status "
                f"{self._process.exitcode}: its log says why, or the kernel's if it was killed "
                "(-9) since there was no memory"
            )
        if not self._next:
            self._await_another(f"has ended with status {self._process.exitcode}", now)
        elif now >= self._next:
            self._next = 0.0
            before = self._connection
            try:
                self._start()
            except OSError as error:  # no memory or descriptors, for now
                self._await_another(f"can't be started ({error})", now)
            else:
                before.close()

    def close(self) -> None:
        """Ends the keeper."""
        self._connection.close()
        if self._is_loading:  # it would notice once they are loaded
            self._process.kill()
        self._process.join(_ENDING)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_ENDING)

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(
            target=_keep, args=(there, self._keeping), name="torchrec_bls keeper"
        )
        with there:
            process.start()
        self._connection, self._process, self._is_loading = here, process, True

    def _await_another(self, what: str, now: float) -> None:
        _log.warning(
            "the process that keeps the tables %s: another one takes over in %.1f s; requests are "
            "answered meanwhile",
            what,
            self._pause,
        )
        self._next = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def _take(self, message: Any) -> str:
        """Takes a message. Returns why there are no tables, if it says so."""
        if isinstance(message, Refreshes):
            self.refreshes = message
        elif message == "":
            self._pause = _PAUSE
            self.has_tables, self._is_loading = True, False
        return message if isinstance(message, str) else ""


def _keep(connection: Connection, keeping: Keeping) -> None:
    """Keeps tables until the other end of the connection is closed."""
    name_process("keeper")
    # Terminals and init systems tell both, and the service says when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import torch

    from torchrec_bls.direct.keeping.keeper import keeper
    from torchrec_bls.serve.inputs import features_in
    from torchrec_bls.serve.probe import FiniteAnswers

    torch.set_num_threads(1)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("torchrec_bls").setLevel(logging.INFO)
    try:
        kept = keeper(keeping.build, keeping.checkpoint, keeping.path)
    except Exception as error:
        connection.send(named(error))
        raise
    give_way()
    with kept:
        watch = None
        if keeping.watch is not None:
            probe = FiniteAnswers(*features_in(keeping.build()), keeping.dense_columns)
            watch = kept.watch(keeping.watch, drain=keeping.drain, probe=probe, pause=_LOOK)
        connection.send("")
        told = Refreshes()
        while True:
            try:
                if connection.poll(_LOOK):
                    connection.recv()
                if watch is not None and told != (told := Refreshes(watch.failed, watch.problem)):
                    connection.send(told)
            except (EOFError, OSError):
                break
    leave()
