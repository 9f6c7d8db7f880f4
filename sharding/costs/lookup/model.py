"""The time of a fused lookup: a constant and a sum over shards.

    time(op) = op_us + sum over shards s of analytic(s) * exp(residual(s))

`analytic` is linear in what the shard makes the machine do; its coefficients are microseconds and
not negative. Boosted trees learn `residual`. Between two lookups of a training step the caches are
swept, so that shards hardly help or hinder each other. So the sum is exact by construction, and the
planner may add up shards one by one. There is one exception, the backward of unpooled lookups: the
cost of a shard depends on the hash maps that all shards of an op share (hash_maps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost_interface import Estimate, Ops
from .features import REUSE_COLUMNS, TERMS, TREE_COLUMNS, analytic_terms, tree_columns
from .hash_maps import MAP_TERMS, map_terms
from .trees import Trees

Floats = npt.NDArray[np.float64]

#: Direction of a forward that an exchange does by itself (LookupWork.by_exchange).
BY_EXCHANGE = "by_exchange"
DIRECTIONS = ("forward", "backward", BY_EXCHANGE)

# For a shard unlike all measured ones the residual is no better than a factor of this.
_LARGEST_RESIDUAL = float(np.log(3.0))


@dataclass(frozen=True)
class LookupModel:
    """Predicts one direction of pooled or of unpooled lookups.

    Attributes:
        op_us: microseconds of an op, whatever it looks up.
        coefficients_us: microseconds for one of each term, float64: first those of `TERMS`, then
            those of `MAP_TERMS` if gradients are added up in maps.
        trees: trees that predict the residual, a logarithm.
        uses_reuse_factors: whether the trees look at the 17 reuse factors as well.
        interval_log: two logarithms; 9 of 10 measurements lie between the prediction times exp of
            the first and times exp of the second.
        lowest, highest: (len(TREE_COLUMNS),) float64, range of the trees' columns in calibration.
    """

    op_us: float
    coefficients_us: Floats
    trees: Trees
    uses_reuse_factors: bool
    interval_log: tuple[float, float]
    lowest: Floats
    highest: Floats

    @property
    def shares_maps(self) -> bool:
        """Returns whether the cost of a shard depends on the other shards of its op."""
        return len(self.coefficients_us) > len(TERMS)

    def shards_us(
        self, columns: dict[str, Floats], ops: Ops, reuse_factors: Floats | None = None
    ) -> Floats:
        """Returns the time that each shard adds to its op.

        Args:
            columns: `as_columns` of the shards.
            ops: the ops that the shards are in.
            reuse_factors: (n, 17) by rows, where the model uses them.

        Returns:
            (n,) float64 microseconds.

        Raises:
            ValueError: the model uses reuse factors and gets none.
        """
        seen = residual_columns(columns, reuse_factors if self.uses_reuse_factors else None)
        if self.uses_reuse_factors and reuse_factors is None:
            raise ValueError("this model was fitted with reuse factors and needs each shard's")
        residual = np.clip(self.trees.predict(seen), -_LARGEST_RESIDUAL, _LARGEST_RESIDUAL)
        terms = op_terms(columns, ops, self.shares_maps)
        microseconds: Floats = terms @ self.coefficients_us * np.exp(residual)
        return microseconds

    def estimate(self, columns: dict[str, Floats], reuse_factors: Floats | None = None) -> Estimate:
        """Returns the time of one op with these shards.

        The interval is that of calibration. For shards outside of what was calibrated it is wider
        by the factor 1 + d: d is how many doublings they are outside, weighted by their time.
        """
        together = Ops.together(len(columns["rows"]))
        shards = self.shards_us(columns, together, reuse_factors)
        total = self.op_us + float(shards.sum())
        seen = tree_columns(columns)
        outside = np.maximum(self.lowest - seen, seen - self.highest).clip(0).max(axis=1)
        wider = 1.0 + float((outside * shards).sum()) / total
        low, high = (total * float(np.exp(log * wider)) for log in self.interval_log)
        return Estimate(total, min(low, total), max(high, total))

    def as_json(self) -> dict[str, Any]:
        """Returns an object for the profile."""
        return {
            "op_us": self.op_us,
            "coefficients_us": dict(
                zip(_terms(self.shares_maps), self.coefficients_us.tolist(), strict=True)
            ),
            "residual_log": self.trees.as_json(),
            "uses_reuse_factors": self.uses_reuse_factors,
            "interval_log": list(self.interval_log),
            "calibrated_log2": {
                name: [low, high]
                for name, low, high in zip(
                    TREE_COLUMNS, self.lowest.tolist(), self.highest.tolist(), strict=True
                )
            },
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LookupModel:
        """Reads what `as_json` wrote.

        Raises:
            ValueError: a name or a number is impossible.
            KeyError, TypeError: something is missing or of another type.
        """
        shares_maps = any(name in record["coefficients_us"] for name in MAP_TERMS)
        coefficients = _in_order(record["coefficients_us"], _terms(shares_maps))
        ranges = np.asarray(_in_order(record["calibrated_log2"], TREE_COLUMNS), dtype=np.float64)
        uses_reuse_factors = bool(record["uses_reuse_factors"])
        width = len(TREE_COLUMNS) + (len(REUSE_COLUMNS) if uses_reuse_factors else 0)
        low, high = (float(log) for log in record["interval_log"])
        model = cls(
            op_us=float(record["op_us"]),
            coefficients_us=np.asarray(coefficients, dtype=np.float64),
            trees=Trees.from_json(record["residual_log"], width),
            uses_reuse_factors=uses_reuse_factors,
            interval_log=(low, high),
            lowest=ranges[:, 0],
            highest=ranges[:, 1],
        )
        times = np.append(model.coefficients_us, model.op_us)
        if not (np.isfinite(times).all() and (times >= 0).all()):
            raise ValueError("a lookup has a negative or infinite time")
        if not -10 < low <= 0 <= high < 10:
            raise ValueError(f"interval_log of a lookup is {[low, high]}")
        if not (model.lowest <= model.highest).all():
            raise ValueError("calibrated_log2 of a lookup has a range that is empty")
        return model


def op_terms(columns: dict[str, Floats], ops: Ops, shares_maps: bool) -> Floats:
    """Returns the terms that the analytic model charges each shard for, (n, terms) float64."""
    terms = analytic_terms(columns)
    return np.concatenate([terms, map_terms(columns, ops)], axis=1) if shares_maps else terms


def _terms(shares_maps: bool) -> tuple[str, ...]:
    return (*TERMS, *MAP_TERMS) if shares_maps else TERMS


def residual_columns(columns: dict[str, Floats], reuse_factors: Floats | None) -> Floats:
    """Returns the columns that the trees look at, (n, columns) float64."""
    seen = tree_columns(columns)
    return seen if reuse_factors is None else np.concatenate([seen, reuse_factors], axis=1)


def _in_order(record: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    if set(record) != set(names):
        raise ValueError(f"has {sorted(record)}, expected {sorted(names)}")
    return [record[name] for name in names]
