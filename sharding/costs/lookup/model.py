"""The time of a fused lookup: a constant and a sum over shards.

    time(op) = op_us + sum over shards s of analytic(s) * exp(residual(s))

`analytic` is linear in what the shard makes the machine do; its coefficients are microseconds and
not negative. Boosted trees learn `residual`. Between two lookups of a training step the caches are
swept, so that shards hardly help or hinder each other. So the sum is exact by construction, and the
planner may add up shards one by one. There is one exception, the backward of unpooled lookups: the
cost of a shard depends on the hash maps that all shards of an op share (hash_maps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from torchrec_bls.records import Amount, Record

from ...cost_interface import Estimate, Ops
from .features import REUSE_COLUMNS, TERMS, TREE_COLUMNS, analytic_terms, tree_columns
from .hash_maps import MAP_TERMS, map_terms
from .trees import Trees, TreesRecord

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


class LookupRecord(Record):
    """A LookupModel in a profile."""

    op_us: Amount
    coefficients_us: dict[str, Amount]
    residual_log: TreesRecord
    uses_reuse_factors: bool
    interval_log: tuple[Annotated[float, Meta(gt=-10, le=0)], Annotated[float, Meta(ge=0, lt=10)]]
    calibrated_log2: dict[str, tuple[float, float]]

    def __post_init__(self) -> None:
        """Raises ValueError for other terms or columns, or an empty range."""
        _check_names("coefficients_us", self.coefficients_us, _terms(self._shares_maps))
        _check_names("calibrated_log2", self.calibrated_log2, TREE_COLUMNS)
        for name, (low, high) in self.calibrated_log2.items():
            if low > high:
                raise ValueError(f"calibrated_log2 of {name} is {[low, high]}, but must ascend")

    @property
    def _shares_maps(self) -> bool:
        return any(name in self.coefficients_us for name in MAP_TERMS)

    def model(self) -> LookupModel:
        """Returns the content.

        Raises:
            ValueError: the trees look at a column that isn't there.
        """
        ranges = np.asarray([self.calibrated_log2[name] for name in TREE_COLUMNS], np.float64)
        terms = _terms(self._shares_maps)
        width = len(TREE_COLUMNS) + (len(REUSE_COLUMNS) if self.uses_reuse_factors else 0)
        return LookupModel(
            op_us=self.op_us,
            coefficients_us=np.asarray([self.coefficients_us[name] for name in terms], np.float64),
            trees=self.residual_log.trees(width),
            uses_reuse_factors=self.uses_reuse_factors,
            interval_log=self.interval_log,
            lowest=ranges[:, 0],
            highest=ranges[:, 1],
        )


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


def _check_names(what: str, given: Mapping[str, object], names: Sequence[str]) -> None:
    if given.keys() != set(names):
        raise ValueError(f"{what} has {sorted(given)}, expected {sorted(names)}")
