"""Larger slots for messages that have outgrown them. All ranks change at the same batch."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torchrec_bls.distributed.exchanges.exchange import Exchange


class SlotBytes(NamedTuple):
    """The slot sizes of a sharding type's exchanges; 0: unchanged."""

    ids: int = 0
    embeddings: int = 0
    gradients: int = 0


class SlotGrowth:
    """Agrees on slots for the exchanges of one sharding type of a module.

    Every rank sends along with its ids the slot sizes that its messages need. A rank that has
    completed the ids of batch n knows what all ranks asked for in it. Every rank has completed
    those ids before it posts the ids of batch n + bound + 1. From that batch on the slots have the
    largest size asked for.

    Args:
        bound: bound of the exchanges.
        exchanges: exchanges of ids, embeddings and gradients.
    """

    def __init__(self, bound: int, exchanges: Sequence[Exchange]) -> None:
        self._bound = bound
        self._exchanges = exchanges
        self._posted = 0
        self._in_force = SlotBytes()
        self._agreed: deque[tuple[int, SlotBytes]] = deque()

    def begin(self) -> tuple[int, SlotBytes]:
        """Returns the number of the next batch to post, and the slots for it. It is the next until
        `posted`."""
        number = self._posted
        while self._agreed and self._agreed[0][0] <= number:
            self._in_force = self._agreed.popleft()[1]
        return number, self._in_force

    def posted(self) -> None:
        """Counts a batch. One whose channel could not be made does not count on any rank."""
        self._posted += 1

    def wanted(self) -> SlotBytes:
        """Returns the slot sizes that this rank's messages need."""
        ids, embeddings, gradients = self._exchanges
        return SlotBytes(
            ids.wanted_slot_bytes, embeddings.wanted_slot_bytes, gradients.wanted_slot_bytes
        )

    def learn(self, number: int, wanted: Sequence[int]) -> None:
        """Takes over the largest slots that ranks asked for with the ids of batch `number`."""
        if not any(wanted):
            return
        latest = self._agreed[-1][1] if self._agreed else self._in_force
        larger = SlotBytes(*map(max, wanted, latest))
        if larger == latest:
            return
        self._agreed.append((number + self._bound + 1, larger))
        for exchange, before, after in zip(self._exchanges, latest, larger, strict=True):
            exchange.growth_is_due |= after > before
