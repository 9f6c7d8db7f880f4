"""The time of a step beyond what its lookups and exchanges take alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from msgspec import structs

from torchrec_bls.records import Amount, Ranks, Record

from ..cost_interface import Estimate


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of a rank's main thread, and factors of lookups and exchanges within a step.

    Attributes:
        lookup: ratio of a lookup's time within a step to its time alone.
        exchange: the same ratio of a collective.
        step: time of every step, whatever the model: Python around it, the optimizer's step.
        group: time of each set of exchanges of a module.
        split_group: more time of each set with tables split by rows, where ids are sorted by rank.
        feature: time of each feature of such a set that is pooled.
        feature_unpooled: time of each feature of such a set that is not pooled.
        shard: time of each shard that a rank holds.
        id_byte: time of each byte of ids that a rank looks up.
        split_id_byte: time of each byte of the own samples' ids and lengths, for tables split by
            rows.
        result_byte: time of each byte of pooled embeddings of the own samples.
        result_byte_unpooled: time of each byte of unpooled embeddings of the own samples.
        column_module_unpooled: more time of each module with such columns, which TorchRec puts
            together.
        column_byte_unpooled: more time of each byte of them.
    """

    lookup: float = 1.0
    exchange: float = 1.0
    step: float = 0.0
    group: float = 0.0
    split_group: float = 0.0
    feature: float = 0.0
    feature_unpooled: float = 0.0
    shard: float = 0.0
    id_byte: float = 0.0
    split_id_byte: float = 0.0
    result_byte: float = 0.0
    result_byte_unpooled: float = 0.0
    column_module_unpooled: float = 0.0
    column_byte_unpooled: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for impossible costs."""
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"host costs have {name} = {value}, but must not be negative")


NAMES = tuple(field.name for field in fields(HostCosts))


@dataclass(frozen=True)
class HostModel:
    """Host costs, as fitted to steps of small models.

    Attributes:
        backend: backend of the exchanges, "gloo" or "bls".
        training: whether there was a backward.
        world_size: number of ranks, on as many cores as the machine has.
        costs: the costs that fit best.
        interval_log: two logarithms; 9 of 10 steps lie between the prediction times exp of the
            first and times exp of the second.
        between_plans_log: standard deviation of the logarithm of (measured ratio / predicted
            ratio), where a ratio is of the steps of two plans of one model.
        held_out_gmae_percent: error on models that nothing was fitted to.
    """

    backend: str
    training: bool
    world_size: int
    costs: HostCosts
    interval_log: tuple[float, float]
    between_plans_log: float
    held_out_gmae_percent: float

    def interval(self, step_us: float) -> Estimate:
        """Returns a predicted step with its interval, microseconds."""
        low, high = (step_us * math.exp(log) for log in self.interval_log)
        return Estimate(step_us, low, high)

    def as_json(self) -> dict[str, Any]:
        """Returns the costs as an object for the profile's JSON."""
        return asdict(self)


class HostRecord(Record):
    """A HostModel in a profile."""

    backend: str
    training: bool
    world_size: Ranks
    costs: dict[str, Amount]
    interval_log: tuple[float, float]
    between_plans_log: Amount
    held_out_gmae_percent: Amount

    def __post_init__(self) -> None:
        """Raises ValueError for an impossible interval or an unknown cost."""
        low, high = self.interval_log
        if not low <= 0 <= high:
            raise ValueError(f"interval_log is {[low, high]}, but must have 0 within it")
        if unknown := sorted(self.costs.keys() - set(NAMES)):
            raise ValueError(f"costs have '{unknown[0]}', but must be of {', '.join(NAMES)}")

    def model(self) -> HostModel:
        """Returns the content."""
        return HostModel(**{**structs.asdict(self), "costs": HostCosts(**self.costs)})
