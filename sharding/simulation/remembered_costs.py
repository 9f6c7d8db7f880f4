"""Costs that are computed once. Different bounds and codecs of a job have the same lookups, and so
have ranks that share a table's rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ..cost_interface import CostModel, Estimate, LookupWork


class RememberedCosts:
    """A cost model that remembers the answers of another one.

    Args:
        model: cost model that is asked once.
    """

    def __init__(self, model: CostModel) -> None:
        self._forward, self._backward = cache(model.lookup_forward), cache(model.lookup_backward)
        self._all_to_all, self._all_reduce = cache(model.all_to_all), cache(model.all_reduce)

    def lookup_forward(self, works: Sequence[LookupWork]) -> Estimate:
        """Returns what the model says."""
        return self._forward(tuple(works))

    def lookup_backward(self, works: Sequence[LookupWork]) -> Estimate:
        """Returns what the model says."""
        return self._backward(tuple(works))

    def all_to_all(
        self,
        sent_bytes: Sequence[float],
        received_bytes: Sequence[float],
        backend: str,
        ranks_per_core: float = 1.0,
        ranks_per_host: int | None = None,
    ) -> Estimate:
        """Returns what the model says."""
        sent, received = tuple(sent_bytes), tuple(received_bytes)
        return self._all_to_all(sent, received, backend, ranks_per_core, ranks_per_host)

    def all_reduce(
        self, bytes: float, world_size: int, backend: str, ranks_per_core: float = 1.0
    ) -> Estimate:
        """Returns what the model says."""
        return self._all_reduce(bytes, world_size, backend, ranks_per_core)
