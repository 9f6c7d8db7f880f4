"""Names of ranks in messages to users: global numbers, and those of the group where they differ."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist


def global_ranks(group: Any) -> list[int]:
    """Returns the global rank of each rank of a group; its own numbers if torch does not know the
    group."""
    with suppress(KeyError, ValueError, RuntimeError):
        return dist.get_process_group_ranks(group)
    return list(range(group.size()))


def rank_name(group: Any, number: int | None = None) -> str:
    """Returns the name of a rank of a group; by default of this process."""
    return RankNames(global_ranks(group)).of(group.rank() if number is None else number)


class RankNames:
    """Names of the ranks of a group.

    Args:
        ranks: global rank of each rank of the group.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._global_ranks = list(ranks)
        self._differ = any(rank != number for number, rank in enumerate(ranks))

    def of(self, number: int) -> str:
        """Returns "rank 3", or "rank 3 (1 of its group)" for rank 1 of a group of other ranks."""
        if not self._differ:
            return f"rank {number}"
        return f"rank {self._global_ranks[number]} ({number} of its group)"

    @property
    def every(self) -> list[str]:
        """Returns the names of all ranks."""
        return [self.of(number) for number in range(len(self._global_ranks))]

    def of_all(self, numbers: Sequence[int]) -> str:
        """Returns "ranks [1, 3]", or "ranks [1, 3] ([0, 1] of their group)"."""
        if not self._differ:
            return f"ranks {list(numbers)}"
        ranks = [self._global_ranks[number] for number in numbers]
        return f"ranks {ranks} ({list(numbers)} of their group)"
