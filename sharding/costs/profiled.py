"""Costs of a step's operations, from a profile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from ..cost_interface import Estimate, LookupWork, Ops
from .collective_model import CollectiveModel, message_bytes
from .host_costs import HostModel
from .lookup.features import as_columns
from .lookup.model import BY_EXCHANGE, LookupModel
from .profile import Profile, ProfileError

Floats = npt.NDArray[np.float64]

_NOTHING = Estimate(0.0, 0.0, 0.0)


class ProfiledCosts:
    """The `AdditiveCosts` of the machine whose profile this is.

    Some shards can't be fused by FBGEMM: pooled with unpooled ones, different precisions, and
    unpooled ones of different dims. They are different ops, one after the other, as TorchRec groups
    them. The ends of their intervals add up.

    Args:
        profile: what was measured of the machine.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    @property
    def profile(self) -> Profile:
        """Returns the profile that the costs come from."""
        return self._profile

    def lookup_forward(self, works: Sequence[LookupWork]) -> Estimate:
        """Returns one rank's forward lookup; a time of 0 without shards.

        Raises:
            ValueError: a shard has impossible numbers.
            ProfileError: the profile lacks such lookups.
        """
        return self._lookup(works, "forward")

    def lookup_backward(self, works: Sequence[LookupWork]) -> Estimate:
        """Returns one rank's backward with the optimizer's update; raises as `lookup_forward`."""
        return self._lookup(works, "backward")

    def marginal_forward(self, works: Sequence[LookupWork]) -> Floats:
        """Returns what each shard adds to a forward, (len(works),) float64 microseconds.

        Their sum, with the profile's `op_us` for each op of FBGEMM's, is exactly `lookup_forward`.
        """
        return self._marginal(works, "forward", Ops.alone(len(works)))

    def marginal_backward(self, works: Sequence[LookupWork], ops: Ops | None = None) -> Floats:
        """Returns what each shard adds to a backward, (len(works),) float64 microseconds.

        Args:
            works: the shards.
            ops: op of each shard; None: each is alone. Only unpooled shards depend on it.
        """
        return self._marginal(works, "backward", Ops.alone(len(works)) if ops is None else ops)

    def all_to_all(
        self,
        sent_bytes: Sequence[float],
        received_bytes: Sequence[float],
        backend: str,
        ranks_per_core: float | None = None,
        ranks_per_host: int | None = None,
    ) -> Estimate:
        """Returns the time of one all-to-all, from a measurement where as many ranks shared a core.

        Args:
            sent_bytes: (world_size,), each rank's total over all destinations, itself included.
            received_bytes: (world_size,), each rank's total over all sources, itself included.
            backend: "gloo", "bls", or "tcp" for channels of bls over TCP. Profiles without these
                have the times of bls in their place.
            ranks_per_core: number of ranks that share a core; None: as many as in the calibration.
            ranks_per_host: an unused number: all ranks that were measured shared a host.

        Raises:
            ValueError: the two have different lengths, or a number is impossible.
            ProfileError: the profile has no all-to-all on this backend.
        """
        if len(sent_bytes) != len(received_bytes):
            raise ValueError(
                f"there are bytes of {len(sent_bytes)} senders and {len(received_bytes)} receivers,"
                " but must be of as many"
            )
        totals = [*sent_bytes, *received_bytes]
        if not all(math.isfinite(total) and total >= 0 for total in totals):
            raise ValueError(
                f"bytes of an all-to-all are {totals}, but must be finite and not negative"
            )
        if len(sent_bytes) < 2:
            return _NOTHING
        even = min(totals) == max(totals)
        model = self._nearest("all_to_all", backend, len(sent_bytes), ranks_per_core)
        size = message_bytes(sent_bytes, received_bytes, model.imbalance)
        return _scaled(model, len(sent_bytes), model.estimate(size, even=even))

    def all_reduce(
        self, bytes: float, world_size: int, backend: str, ranks_per_core: float | None = None
    ) -> Estimate:
        """Returns the time of an all-reduce of `bytes` on each rank; `ranks_per_core` as above.

        Raises:
            ValueError: a number is impossible.
            ProfileError: the profile has no all-reduce on this backend.
        """
        if not (math.isfinite(bytes) and bytes >= 0 and world_size >= 1):
            raise ValueError(
                f"an all-reduce is of {bytes} bytes among {world_size} ranks, but bytes must be"
                " finite and not negative, and ranks at least one"
            )
        if world_size < 2:
            return _NOTHING
        model = self._nearest("all_reduce", backend, world_size, ranks_per_core)
        return _scaled(model, world_size, model.estimate(bytes))

    def host(
        self, backend: str, training: bool, world_size: int, ranks_per_core: float
    ) -> HostModel | None:
        """Returns a step's costs beside lookups and exchanges; None if the profile lacks them.

        Args:
            backend: backend of the exchanges, "gloo" or "bls".
            training: whether there is a backward.
            world_size: number of ranks.
            ranks_per_core: number of ranks that share a core, at least 1.
        """
        known = {
            size: model
            for (name, trained, size), model in self._profile.hosts.items()
            if name == backend and trained == training
        }
        return known[self._closest(known, world_size, ranks_per_core)] if known else None

    def _lookup(self, works: Sequence[LookupWork], direction: str) -> Estimate:
        ops: defaultdict[tuple[bool, bool, int, int], list[LookupWork]] = defaultdict(list)
        for work in works:
            width = 0 if work.pooled else work.dim
            ops[work.pooled, work.by_exchange, work.weight_bytes, width].append(work)
        total, low, high = 0.0, 0.0, 0.0
        for members in ops.values():
            estimate = self._model(members[0], direction).estimate(as_columns(members))
            total += estimate.microseconds
            low += estimate.low
            high += estimate.high
        return Estimate(total, low, high)

    def _marginal(self, works: Sequence[LookupWork], direction: str, ops: Ops) -> Floats:
        times = np.zeros(len(works))
        kinds = np.asarray([(work.pooled, work.by_exchange) for work in works], dtype=bool)
        for kind in product((True, False), repeat=2):
            places = np.flatnonzero((kinds.reshape(-1, 2) == kind).all(axis=1))
            if len(places):
                alike = [works[int(i)] for i in places]
                model = self._model(alike[0], direction)
                times[places] = model.shards_us(as_columns(alike), ops.take(places))
        return times

    def _model(self, work: LookupWork, direction: str) -> LookupModel:
        """Returns the model of such a lookup; FBGEMM's in profiles that lack the exchange's."""
        lookups = self._profile.lookups
        if direction == "forward" and work.by_exchange and (work.pooled, BY_EXCHANGE) in lookups:
            return lookups[work.pooled, BY_EXCHANGE]
        if (work.pooled, direction) not in lookups:
            kind = "pooled" if work.pooled else "unpooled"
            raise ProfileError(f"{self._profile} has no {kind} lookup {direction}: calibrate again")
        return lookups[work.pooled, direction]

    def _nearest(
        self, operation: str, backend: str, world_size: int, ranks_per_core: float | None = None
    ) -> CollectiveModel:
        known = {
            size: model
            for (kind, name, size), model in self._profile.collectives.items()
            if kind == operation and name == backend
        }
        if not known and backend == "tcp":
            return self._nearest(operation, "bls", world_size, ranks_per_core)
        if not known:
            raise ProfileError(
                f"{self._profile} has no {operation} on backend {backend!r}: calibrate again"
            )
        return known[self._closest(known, world_size, ranks_per_core)]

    def _closest(self, sizes: Iterable[int], world_size: int, ranks_per_core: float | None) -> int:
        """Returns the world size that shared cores most alike; of several, the nearest one."""

        def distance(size: int) -> tuple[float, float, int]:
            sharing = max(1.0, size / self._profile.machine.cores)
            wanted = sharing if ranks_per_core is None else ranks_per_core
            return abs(math.log2(sharing / wanted)), abs(math.log2(size / world_size)), -size

        return min(sizes, key=distance)


def _scaled(model: CollectiveModel, world_size: int, estimate: Estimate) -> Estimate:
    """Returns the estimate for another number of ranks than was calibrated.

    Peers are served one after the other. So the part that doesn't depend on bytes grows with their
    number. Nobody measured how far that holds: the interval doubles with each doubling.
    """
    peers = (world_size - 1) / (model.world_size - 1)
    start = min(model.curve.start_us, estimate.microseconds)
    time = estimate.microseconds + (peers - 1) * start
    unsure = 2 ** abs(math.log2(world_size / model.world_size))
    low, high = estimate.low / estimate.microseconds, estimate.high / estimate.microseconds
    return Estimate(time, time * low**unsure, time * high**unsure, estimate.on_core)
