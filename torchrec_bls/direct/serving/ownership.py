"""Which process publishes the tables of each rank."""

from collections.abc import Sequence

from torchrec_bls import _native
from torchrec_bls.direct.process import is_alive, pid_of, this_process

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

    def act_for(self, owner: int) -> bool:
        """Puts this process in the place of a rank that is gone, until `give_up`.

        Returns:
            False if another process acts for the rank at the moment.

        Raises:
            ValueError: the rank's process lives.
        """
        before = self._lead.process(owner)
        if before & _ACTING and is_alive(before & ~_ACTING):
            return False
        if is_alive(before):
            raise ValueError(
                f"rank {owner} lives, as process {pid_of(before)}: it publishes its tables itself"
            )
        taken = self._lead.take_over(owner, before, this_process().identity | _ACTING)
        if taken:
            self._follow(owner)
        return taken

    def give_up(self, owner: int) -> None:
        """Lets another process publish for a rank: the one that comes back for it, or any other."""
        own = this_process().identity
        for before in (own | _ACTING, own):
            self._lead.take_over(owner, before, 0)
        self._follow(owner)

    def _follow(self, owner: int) -> None:
        for page in self._others:
            page.take_over(owner, page.process(owner), self._lead.process(owner))
