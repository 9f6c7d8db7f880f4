"""Which process publishes the tables of each rank."""

from collections.abc import Sequence

from torchrec_bls import _native
from torchrec_bls.direct.process import is_alive, pid_of, this_process


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
        if is_alive(before):
            raise ValueError(
                f"rank {owner} lives, as process {pid_of(before)}: it publishes its tables itself"
            )
        if not self._lead.take_over(owner, before, this_process().identity):
            raise ValueError(f"another process publishes for rank {owner} already")
        self._follow(owner)

    def give_up(self, owner: int) -> None:
        """Lets another process publish for a rank: the one that comes back for it, or any other."""
        self._lead.take_over(owner, this_process().identity, 0)
        self._follow(owner)

    def _follow(self, owner: int) -> None:
        for page in self._others:
            page.take_over(owner, page.process(owner), self._lead.process(owner))
