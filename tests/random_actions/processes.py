"""What happens to the processes of a life: some are stopped or killed, and all are ended."""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from tests.direct import nodes
from tests.direct.nodes import until

KILL, PAUSE = "kill", "stopped for a while"
_PAUSES, _LONGEST_PAUSE = 0.3, 0.2


class Life(Protocol):
    """The processes of a life.

    Attributes:
        counts: how often each thing happened.
    """

    counts: Counter[str]

    def close(self) -> None:
        """Ends the processes. Raises AssertionError for one that can't be ended."""


L = TypeVar("L", bound=Life)


def hurt(pid: int, draw: random.Random, kills: float, longest: float) -> str | None:
    """Kills a process after a while, stops it for a while, or does nothing to it.

    Args:
        pid: process to hurt.
        draw: source of what is drawn.
        kills: share of kills.
        longest: seconds until then, at most.

    Returns:
        `KILL`, `PAUSE` or None.
    """
    fate = draw.random()
    time.sleep(draw.uniform(0.0, longest))
    if fate < kills:
        os.kill(pid, signal.SIGKILL)
        until(lambda: nodes.state_of(pid) in "ZX")
        return KILL
    if fate < kills + _PAUSES:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(0.0, _LONGEST_PAUSE))
        os.kill(pid, signal.SIGCONT)
        return PAUSE
    return None


def lived(seed: int, born: Callable[[Path], L], act: Callable[[L], None]) -> Counter[str]:
    """Returns how often each thing happened in one life.

    Args:
        seed: seed of the life, for errors.
        born: function that begins a life, whose sockets are in a folder.
        act: function that lives it.

    Raises:
        AssertionError: a batch was wrong, or a process waited or could not go on; the text has the
            seed.
    """
    with tempfile.TemporaryDirectory(prefix="bls") as folder:
        life = born(Path(folder))
        try:
            act(life)
        except BaseException as error:
            with suppress(AssertionError):  # of others that were interrupted by this
                life.close()
            raise AssertionError(f"life {seed}: {error}") from error
        life.close()
    return life.counts
