"""Which process publishes the tables of each rank."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchrec_bls import _native
from torchrec_bls.direct.process import is_alive, pid_of, this_process
from torchrec_bls.direct.serving.versions import PAUSE
from torchrec_bls.errors import PeerTimeoutError

# In the place of a rank: the process acts for the rank and gives the place up again. So the rank
# counts as gone, since no living process has this number.
_ACTING = 1 << 63


class Ownership:
    """The processes that publish, as a model's control pages name them.

    The page of the first module decides, and the others follow it.

    Args:
        pages: control page of each module.
    """

    def __init__(self, pages: Sequence[_native.ControlPage]) -> None:
        self._lead, *self._others = pages

    def is_own(self, owner: int) -> bool:
        """Returns whether this process publishes for a rank."""
        return self._lead.process(owner) == this_process().identity

    def take_over(self, owner: int) -> None:
        """Makes this process publish for a rank, until it ends or gives that up.

        Raises:
            ValueError: the rank's process lives, or another process was quicker.
        """
        before = self._lead.process(owner)
        if is_alive(before & ~_ACTING):
            pid = pid_of(before)
            what = "is acted for by" if before & _ACTING else "lives, as"
            raise ValueError(f"rank {owner} {what} process {pid}: it publishes its tables itself")
        if not self._lead.take_over(owner, before, this_process().identity):
            raise ValueError(f"another process publishes for rank {owner} already")
        self._follow(owner)

    @contextmanager
    def in_place_of(self, owner: int, end: float) -> Iterator[None]:
        """Puts this process in the place of a rank that is gone, for the time of this context. One
        thread at a time may ask. Nothing happens if it publishes for the rank anyway.

        Args:
            owner: the rank.
            end: end of the wait for another process that acts for it, in `time.monotonic()`.

        Raises:
            ValueError: the rank's process lives.
            PeerTimeoutError: another process that acts for the rank has not finished by then.
        """
        own, had_it = this_process().identity | _ACTING, self.is_own(owner)
        give_back = self._lead.take_over
        try:
            while not had_it and not self._act_for(owner, own):
                if time.monotonic() >= end:
                    raise PeerTimeoutError(
                        f"another process acts for rank {owner}, and has not finished"
                    )
                time.sleep(PAUSE)
            yield
        finally:
            # A native call comes first: a signal may strike at the first line of a function.
            give_back(owner, own, 0)
            self._follow(owner)

    def _act_for(self, owner: int, own: int) -> bool:
        """Returns False if another process acts for the rank at the moment."""
        before = self._lead.process(owner)
        if before == own:  # a signal has kept this process from giving it back
            return True
        if before & _ACTING and is_alive(before & ~_ACTING):
            return False
        if is_alive(before):
            raise ValueError(
                f"rank {owner} lives, as process {pid_of(before)}: it publishes its tables itself"
            )
        taken = self._lead.take_over(owner, before, own)
        if taken:
            self._follow(owner)
        return taken

    def give_up(self, owner: int) -> None:
        """Lets another process publish for a rank: the one that comes back for it, or any other."""
        self._lead.take_over(owner, this_process().identity, 0)
        self._follow(owner)

    def _follow(self, owner: int) -> None:
        for page in self._others:
            page.take_over(owner, page.process(owner), self._lead.process(owner))
