"""Larger slots for messages that have outgrown them, from one batch on for all ranks."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torchrec_bls.distributed.exchanges.exchange import Exchange


class SlotBytes(NamedTuple):
    """Sizes of the slots of a sharding type's exchanges; 0: as large as they are."""

    ids: int = 0
    embeddings: int = 0
    gradients: int = 0


class SlotGrowth:
    """Agrees on slots for the exchanges of one sharding type of a module.

    Every rank says along with its ids how large slots its messages ask for. Who has completed the
    ids of batch n knows what all ranks asked for then, and every rank has completed them before it
    posts those of batch n + bound + 1: from that batch on the slots are the largest asked for.

    Args:
        bound: of the exchanges.
        exchanges: of ids, embeddings and gradients.
    """

    def __init__(self, bound: int, exchanges: Sequence[Exchange]) -> None:
        self._bound = bound
        self._exchanges = exchanges
        self._posted = 0
        self._in_force = SlotBytes()
        self._agreed: deque[tuple[int, SlotBytes]] = deque()

    def begin(self) -> tuple[int, SlotBytes]:
        """Returns the number of the batch whose ids are posted next and the slots for it."""
        number, self._posted = self._posted, self._posted + 1
        while self._agreed and self._agreed[0][0] <= number:
            self._in_force = self._agreed.popleft()[1]
        return number, self._in_force

    def wanted(self) -> SlotBytes:
        """Returns what this rank's messages ask for."""
        return SlotBytes(*(exchange.wanted_slot_bytes for exchange in self._exchanges))

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
