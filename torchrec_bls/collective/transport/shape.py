"""The facts about a channel that its ranks have agreed on."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The facts about a channel that its ranks have agreed on.

    Attributes:
        name: name of the channel.
        rank: rank of this process.
        hosts: identity of each rank's host.
        slots: number of slots for each ordered pair of ranks.
        slot_bytes: size of a slot.
        deadline: seconds that a wait may take.
        names: name of each rank in errors; empty: their numbers.
    """

    name: str
    rank: int
    hosts: Sequence[str]
    slots: int
    slot_bytes: int
    deadline: float
    names: Sequence[str] = ()

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return len(self.hosts)

    @property
    def local_ranks(self) -> list[int]:
        """Returns the ranks on this rank's host, with this one."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
