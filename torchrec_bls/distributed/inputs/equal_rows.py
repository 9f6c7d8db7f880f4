"""Which embeddings on their way back are equal. Both ends of the way know it from the ids."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchrec_bls import _native

# In place of the number of a block: nothing is known of its rows.
_UNKNOWN = -1


class EqualRows(NamedTuple):
    """Groups of equal rows.

    Attributes:
        bags: groups by blocks.
        blocks: numbers of the blocks, below 0 where nothing is known. On the side that sends ids
            there is one entry for each key; on the side that looks them up, one for each feature
            and rank.
    """

    bags: _native.EqualBags
    blocks: list[int]


class UniqueRows(NamedTuple):
    """The questions about equal rows of a sharding.

    Attributes:
        pooled: whether bags have a row each; otherwise ids have one.
        wanted: whether equal rows should travel once, [rank][feature] in the order of the lookups.
    """

    pooled: bool
    wanted: list[list[bool]]

    def sent(
        self,
        lengths: torch.Tensor,
        values: torch.Tensor,
        stride: int,
        counts: Sequence[int],
        order: Sequence[int],
    ) -> EqualRows:
        """Returns the equal rows among those that will come for this rank's ids.

        Args:
            lengths: lengths of the bags, by key; contiguous.
            values: ids, by key; contiguous.
            stride: number of bags of a key.
            counts: number of ids of each key.
            order: keys by destination rank, by index; empty means all.
        """
        wanted = [each for of_rank in self.wanted for each in of_rank]
        keys = order or range(len(wanted))
        wanted_keys = {key for key, each in zip(keys, wanted, strict=True) if each}
        blocks = [(stride, count, key in wanted_keys) for key, count in enumerate(counts)]
        return EqualRows(
            self._find(lengths, values, blocks),
            [key if each else _UNKNOWN for key, each in zip(keys, wanted, strict=True)],
        )

    def received(
        self,
        rank: int,
        lengths: torch.Tensor,
        values: torch.Tensor,
        strides: Sequence[int],
        counts: Sequence[int],
    ) -> EqualRows:
        """Returns the equal rows among those that this rank looks up.

        Args:
            rank: this rank.
            lengths: lengths of the bags, by feature and rank; contiguous.
            values: ids, by feature and rank; contiguous.
            strides: number of bags of a feature, by rank.
            counts: number of ids, by feature and rank.
        """
        wanted = [each for each in self.wanted[rank] for _ in strides]
        bags = [*strides] * len(self.wanted[rank])
        blocks = list(zip(bags, counts, wanted, strict=True))
        return EqualRows(self._find(lengths, values, blocks), list(range(len(blocks))))

    def _find(
        self, lengths: torch.Tensor, ids: torch.Tensor, blocks: list[tuple[int, int, bool]]
    ) -> _native.EqualBags:
        if self.pooled:
            return _native.EqualBags(lengths, ids, blocks)
        blocks = [(count, count, wanted) for _, count, wanted in blocks]
        return _native.EqualBags(None, ids, blocks)
