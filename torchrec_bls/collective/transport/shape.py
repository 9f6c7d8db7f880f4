"""What the ranks of a channel have agreed on."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What the ranks of a channel have agreed on.

    Attributes:
        name: of the channel.
        rank: of this process.
        hosts: identity of each rank's host.
        slots: per ordered pair of ranks.
        slot_bytes: of a slot.
        deadline: seconds.
    """

    name: str
    rank: int
    hosts: Sequence[str]
    slots: int
    slot_bytes: int
    deadline: float

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks on this rank's host, it among them."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
