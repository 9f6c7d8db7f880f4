"""Costs of a step's operations, from a profile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..cost_interface import Estimate, LookupWork, Ops
from .collective_model import CollectiveModel, message_bytes
from .host_costs import HostModel
from .lookup.features import as_columns
from .profile import Profile, ProfileError

Floats = npt.NDArray[np.float64]

_NOTHING = Estimate(0.0, 0.0, 0.0)


class ProfiledCosts:
    """The `AdditiveCosts` of the machine that a profile was measured on.

    Shards that FBGEMM can't fuse (pooled and not, other precisions, without pooling other dims) are
    different ops, one after the other, as TorchRec groups them; their ends of the interval add up.

    Args:
        profile: what was measured of the machine.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    @property
    def profile(self) -> Profile:
        """The profile that the costs are of."""
        return self._profile

    def lookup_forward(self, works: Sequence[LookupWork]) -> Estimate:
        """One rank's forward lookup; nothing without shards.

        Raises:
            ValueError: a shard with numbers that can't be.
            ProfileError: the profile lacks such lookups.
        """
        return self._lookup(works, "forward")

    def lookup_backward(self, works: Sequence[LookupWork]) -> Estimate:
        """One rank's backward with the optimizer's update; errors as `lookup_forward`."""
        return self._lookup(works, "backward")

    def marginal_forward(self, works: Sequence[LookupWork]) -> Floats:
        """What each shard adds to a forward, (len(works),) float64 microseconds.

        With `op_forward` for each op they sum to `lookup_forward`, exactly.
        """
        return self._marginal(works, "forward", Ops.alone(len(works)))

    def marginal_backward(self, works: Sequence[LookupWork], ops: Ops | None = None) -> Floats:
        """What each shard adds to a backward, (len(works),) float64 microseconds.

        Args:
            works: the shards.
            ops: which op each shard is in; None: each is alone. It matters to unpooled ones only.
        """
        return self._marginal(works, "backward", Ops.alone(len(works)) if ops is None else ops)

    def op_forward(self, pooled: bool = True) -> float:
        """What a fused forward takes before any shard, in microseconds."""
        return self._profile.lookups[pooled, "forward"].op_us

    def op_backward(self, pooled: bool = True) -> float:
        """What a fused backward takes before any shard, in microseconds."""
        return self._profile.lookups[pooled, "backward"].op_us

    def all_to_all(
        self,
        sent_bytes: Sequence[float],
        received_bytes: Sequence[float],
        backend: str,
        ranks_per_core: float | None = None,
        ranks_per_host: int | None = None,
    ) -> Estimate:
        """One all-to-all, as it was measured where as many ranks shared a core.

        Args:
            sent_bytes: (world_size,), each rank's total over all destinations, itself included.
            received_bytes: (world_size,), each rank's total over all sources, itself included.
            backend: "gloo" or "bls".
            ranks_per_core: how many share a core; None: as many as did among so many ranks.
            ranks_per_host: not heeded: all ranks that were measured shared a host.

        Raises:
            ValueError: the two have different lengths, or a number that can't be.
            ProfileError: the profile has no all-to-all on this backend.
        """
        if len(sent_bytes) != len(received_bytes):
            raise ValueError(f"{len(sent_bytes)} senders and {len(received_bytes)} receivers")
        totals = [*sent_bytes, *received_bytes]
        if not all(math.isfinite(total) and total >= 0 for total in totals):
            raise ValueError(f"bytes of an all-to-all: {totals}")
        if len(sent_bytes) < 2:
            return _NOTHING
        even = min(totals) == max(totals)
        model = self._nearest("all_to_all", backend, len(sent_bytes), ranks_per_core)
        size = message_bytes(sent_bytes, received_bytes, model.imbalance)
        return _scaled(model, len(sent_bytes), model.estimate(size, even=even))

    def all_reduce(
        self, bytes: float, world_size: int, backend: str, ranks_per_core: float | None = None
    ) -> Estimate:
        """One all-reduce of `bytes` on each rank; `ranks_per_core` as for `all_to_all`.

        Raises:
            ValueError: a number that can't be.
            ProfileError: the profile has no all-reduce on this backend.
        """
        if not (math.isfinite(bytes) and bytes >= 0 and world_size >= 1):
            raise ValueError(f"an all-reduce of {bytes} bytes among {world_size} ranks")
        if world_size < 2:
            return _NOTHING
        model = self._nearest("all_reduce", backend, world_size, ranks_per_core)
        return _scaled(model, world_size, model.estimate(bytes))

    def host(
        self, backend: str, training: bool, world_size: int, ranks_per_core: float
    ) -> HostModel | None:
        """What a step takes beside lookups and exchanges; None if the profile does not know.

        Args:
            backend: what exchanges go by, "gloo" or "bls".
            training: whether there is a backward.
            world_size: ranks.
            ranks_per_core: how many share a core, at least 1.
        """
        known = {
            size: model
            for (name, trained, size), model in self._profile.hosts.items()
            if name == backend and trained == training
        }
        return known[self._closest(known, world_size, ranks_per_core)] if known else None

    def _lookup(self, works: Sequence[LookupWork], direction: str) -> Estimate:
        ops: defaultdict[tuple[bool, int, int], list[LookupWork]] = defaultdict(list)
        for work in works:
            ops[work.pooled, work.weight_bytes, 0 if work.pooled else work.dim].append(work)
        total, low, high = 0.0, 0.0, 0.0
        for (pooled, _, _), members in ops.items():
            self._check(pooled, direction)
            estimate = self._profile.lookups[pooled, direction].estimate(as_columns(members))
            total += estimate.microseconds
            low += estimate.low
            high += estimate.high
        return Estimate(total, low, high)

    def _marginal(self, works: Sequence[LookupWork], direction: str, ops: Ops) -> Floats:
        times = np.zeros(len(works))
        pooled_works = np.asarray([work.pooled for work in works], dtype=bool)
        for pooled in (True, False):
            places = np.flatnonzero(pooled_works == pooled)
            if len(places):
                self._check(pooled, direction)
                columns = as_columns([works[int(i)] for i in places])
                model = self._profile.lookups[pooled, direction]
                times[places] = model.shards_us(columns, ops.take(places))
        return times

    def _check(self, pooled: bool, direction: str) -> None:
        if (pooled, direction) not in self._profile.lookups:
            kind = "pooled" if pooled else "unpooled"
            raise ProfileError(
                f"profile {self._profile.name} has no {kind} lookup {direction}: calibrate again"
            )

    def _nearest(
        self, operation: str, backend: str, world_size: int, ranks_per_core: float | None = None
    ) -> CollectiveModel:
        known = {
            size: model
            for (kind, name, size), model in self._profile.collectives.items()
            if kind == operation and name == backend
        }
        if not known:
            raise ProfileError(
                f"profile {self._profile.name} has no {operation} on backend {backend!r}:"
                " calibrate again"
            )
        return known[self._closest(known, world_size, ranks_per_core)]

    def _closest(self, sizes: Iterable[int], world_size: int, ranks_per_core: float | None) -> int:
        """Returns the world size that shared cores most alike, of these the nearest one."""

        def distance(size: int) -> tuple[float, float, int]:
            sharing = max(1.0, size / self._profile.machine.cores)
            wanted = sharing if ranks_per_core is None else ranks_per_core
            return abs(math.log2(sharing / wanted)), abs(math.log2(size / world_size)), -size

        return min(sizes, key=distance)


def _scaled(model: CollectiveModel, world_size: int, estimate: Estimate) -> Estimate:
    """The same among another number of ranks than was calibrated.

    Peers are served one after the other, so that what isn't bytes grows with their number. How far
    that holds nobody measured: the interval doubles with each doubling.
    """
    peers = (world_size - 1) / (model.world_size - 1)
    start = min(model.curve.start_us, estimate.microseconds)
    time = estimate.microseconds + (peers - 1) * start
    unsure = 2 ** abs(math.log2(world_size / model.world_size))
    low, high = estimate.low / estimate.microseconds, estimate.high / estimate.microseconds
    return Estimate(time, time * low**unsure, time * high**unsure, estimate.on_core)
