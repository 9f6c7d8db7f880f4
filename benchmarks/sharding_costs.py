"""The costs that the benchmarks of sharding plan with: a profile's, or crude ones without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torchrec_bls.sharding.cost_interface import AdditiveCosts, Estimate, LookupWork, Ops


class CrudeCosts:
    """Bytes over a bandwidth and a constant, of the magnitude of two CPU cores under 4 ranks.

    For planning times and plan quality, which depend on no machine, and for plans that are executed
    where nothing was calibrated.
    """

    op_us, shard_us = 240.0, 5.0
    forward_bytes_per_us, backward_bytes_per_us = 6e3, 3e3
    exchange_us, exchange_bytes_per_us = 400.0, 1.2e3
    _interval = 0.3

    def marginal_forward(self, works: Sequence[LookupWork]) -> NDArray[np.float64]:
        """Microseconds of each shard."""
        return self.shard_us + _read_bytes(works) / self.forward_bytes_per_us

    def marginal_backward(
        self, works: Sequence[LookupWork], ops: Ops | None = None
    ) -> NDArray[np.float64]:
        """Microseconds of each shard."""
        return self.shard_us + _read_bytes(works) / self.backward_bytes_per_us

    def lookup_forward(self, works: Sequence[LookupWork]) -> Estimate:
        """All shards of a rank."""
        return self._estimate(self.op_us + float(self.marginal_forward(works).sum()))

    def lookup_backward(self, works: Sequence[LookupWork]) -> Estimate:
        """All shards of a rank."""
        return self._estimate(self.op_us + float(self.marginal_backward(works).sum()))

    def all_to_all(
        self, sent_bytes: Sequence[float], received_bytes: Sequence[float], backend: str
    ) -> Estimate:
        """By the rank with most bytes."""
        most = max(*sent_bytes, *received_bytes)
        return self._estimate(self.exchange_us + most / self.exchange_bytes_per_us)

    def all_reduce(self, bytes: float, world_size: int, backend: str) -> Estimate:
        """A ring."""
        moved = 2 * bytes * (world_size - 1) / world_size
        return self._estimate(self.exchange_us + moved / self.exchange_bytes_per_us)

    def _estimate(self, time: float) -> Estimate:
        return Estimate(time, time * (1 - self._interval), time * (1 + self._interval))


def _read_bytes(works: Sequence[LookupWork]) -> NDArray[np.float64]:
    """Bytes of all lookups, of which repeated ones come from a cache at a quarter of the price."""
    return np.array(
        [
            (0.25 * work.samples * work.pooling + 0.75 * work.unique_rows)
            * work.dim
            * work.weight_bytes
            for work in works
        ]
    )


def costs_of(profile: str | None) -> AdditiveCosts:
    """Returns the costs of a profile by its file or name, crude ones for None."""
    if profile is None:
        return CrudeCosts()
    from torchrec_bls.sharding.costs.profile import load_profile
    from torchrec_bls.sharding.costs.profiled import ProfiledCosts

    return ProfiledCosts(load_profile(profile))
