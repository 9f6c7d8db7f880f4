"""What a step takes beside what its lookups and exchanges take alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..cost_interface import Estimate


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of a rank's main thread, and how lookups and exchanges fare within a step.

    Attributes:
        lookup: time of a lookup within a step, over the time of it alone.
        exchange: likewise, of a collective.
        step: whatever the model: Python around it, the optimizer's step.
        group: of each set of exchanges of a module.
        split_group: more of each whose tables are split by rows, where ids are sorted by rank.
        feature: of each feature of these that is pooled.
        feature_unpooled: of each one that is not.
        shard: of each shard that a rank holds.
        id_byte: of each byte of ids that a rank looks up.
        split_id_byte: of each byte of the own samples' ids, and lengths, of tables split by rows.
        result_byte: of each byte of pooled embeddings of the own samples.
        result_byte_unpooled: of each byte of the others.
        column_byte_unpooled: more of each of these that comes column-wise, to be put together.
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
    column_byte_unpooled: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for costs that can't be."""
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"host costs have {name} = {value}, but must not be negative")


NAMES = tuple(field.name for field in fields(HostCosts))


@dataclass(frozen=True)
class HostModel:
    """Host costs as they were fitted to steps of small models.

    Attributes:
        backend: backend of the exchanges, "gloo" or "bls".
        training: whether there was a backward.
        world_size: ranks, on as many cores as the machine has.
        costs: that fit best.
        interval_log: a step lies between the prediction times exp of these, 9 times of 10.
        between_plans_log: by how much the ratio of two plans' steps, of one model, differs from the
            predicted ratio: the standard deviation of its logarithm.
        held_out_gmae_percent: of models that nothing was fitted to.
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
        """An object for the profile."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> HostModel:
        """Reads what `as_json` wrote.

        Raises:
            ValueError: a number that can't be right.
            KeyError, TypeError: something is missing or of another type.
        """
        low, high = (float(log) for log in record["interval_log"])
        if not (math.isfinite(low) and math.isfinite(high) and low <= 0 <= high):
            raise ValueError(f"host costs have the interval {record['interval_log']}")
        between = float(record["between_plans_log"])
        if not (math.isfinite(between) and between >= 0):
            raise ValueError(f"host costs tell plans apart by {between}")
        if int(record["world_size"]) < 2:
            raise ValueError(f"host costs of {record['world_size']} ranks")
        return cls(
            str(record["backend"]),
            bool(record["training"]),
            int(record["world_size"]),
            HostCosts(**{name: float(value) for name, value in record["costs"].items()}),
            (low, high),
            between,
            float(record["held_out_gmae_percent"]),
        )
