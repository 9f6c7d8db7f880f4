"""Fits lookup models to measured ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost_interface import LookupWork, Ops
from ...reuse.statistics import REUSE_BINS
from ..lookup.features import as_columns, tree_columns
from ..lookup.model import BY_EXCHANGE, LookupModel, op_terms, residual_columns
from ..lookup.trees import Bins, Trees, empty, grow
from .intervals import interval_log
from .least_squares import nonnegative_relative
from .repeats import LOOKUP_TIMES

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_DEPTH = 3
_MOST_TREES = 120
_TREES_STEP = 20
_RATE = 0.15
_FOLDS = 5

#: A model of fewer ops is not fitted.
LEAST_OPS = 2 * _FOLDS


@dataclass(frozen=True)
class LookupSamples:
    """Measured ops and their shards.

    Attributes:
        works: shards of all ops, op after op.
        op_of: (len(works),) int64, ascending, the op of each shard.
        measured_us: (ops,) float64, the measured microseconds.
        reuse_factors: (len(works), 17) float64, reuse factors by rows.
        share_maps: whether the shards of an op add up gradients in common maps.
    """

    works: tuple[LookupWork, ...]
    op_of: Integers
    measured_us: Floats
    reuse_factors: Floats
    share_maps: bool = False

    @property
    def ops(self) -> Ops:
        """Returns which shards are looked up together."""
        return Ops(self.op_of, np.ones(len(self.works)))

    def take(self, ops: Integers) -> LookupSamples:
        """Returns the samples of these ops only, in their order."""
        place = np.full(len(self.measured_us), -1)
        place[ops] = np.arange(len(ops))
        order = np.argsort(place[self.op_of], kind="stable")
        order = order[place[self.op_of[order]] >= 0]
        return LookupSamples(
            tuple(self.works[i] for i in order),
            place[self.op_of[order]],
            self.measured_us[ops],
            self.reuse_factors[order],
            self.share_maps,
        )

    def predicted_us(self, model: LookupModel) -> Floats:
        """Returns the time that the model predicts for each op, (ops,) float64."""
        factors = self.reuse_factors if model.uses_reuse_factors else None
        shards = model.shards_us(as_columns(self.works), self.ops, factors)
        return model.op_us + self.sums(shards)

    def sums(self, of_shards: Floats) -> Floats:
        """Adds up the shards of each op."""
        total: Floats = np.bincount(self.op_of, of_shards, len(self.measured_us)).astype(np.float64)
        return total


def samples_of(
    records: Sequence[dict[str, Any]], direction: str, pooled: bool, time: str
) -> LookupSamples:
    """Collects measured workloads.

    Args:
        records: workloads with their times, as `LookupTimer.measure` returns them.
        direction: "forward", "backward" or "by_exchange". Workloads without such times are left
            out.
        pooled: kind of lookups to collect.
        time: one of `LOOKUP_TIMES`.
    """
    works: list[LookupWork] = []
    op_of: list[int] = []
    measured: list[float] = []
    factors: list[list[float]] = []
    for record in records:
        configuration = record["configuration"]
        if configuration["pooled"] != pooled or f"{direction}_us" not in record:
            continue
        shards = zip(
            configuration["tables"],
            record["lookups"],
            record["unique_rows"],
            record["reuse_factors"],
            strict=True,
        )
        for table, lookups, unique_rows, reuse in shards:
            works.append(
                LookupWork(
                    rows=table["rows"],
                    dim=table["dim"],
                    weight_bytes=configuration["weight_bytes"],
                    samples=configuration["samples"],
                    pooling=lookups / configuration["samples"],
                    unique_rows=unique_rows,
                    pooled=pooled,
                    by_exchange=direction == BY_EXCHANGE,
                )
            )
            op_of.append(len(measured))
            factors.append([*reuse, *[0.0] * (REUSE_BINS - len(reuse))])
        measured.append(LOOKUP_TIMES[time](record[f"{direction}_us"]))
    return LookupSamples(
        tuple(works),
        np.asarray(op_of, dtype=np.int64),
        np.asarray(measured, dtype=np.float64),
        np.asarray(factors, dtype=np.float64).reshape(len(works), REUSE_BINS),
        share_maps=direction == "backward" and not pooled,
    )


def fit_lookup(samples: LookupSamples, *, reuse_factors: bool = False) -> LookupModel:
    """Fits the analytic part, then the residual, then the interval.

    Cross-validation within `samples` chooses the number of trees. Its errors also give the
    interval.

    Args:
        samples: at least `LEAST_OPS` ops.
        reuse_factors: whether the trees see the reuse factors.

    Raises:
        ValueError: there are too few ops.
    """
    ops = len(samples.measured_us)
    if ops < LEAST_OPS:
        raise ValueError(f"{ops} measured lookups; at least {LEAST_OPS} are needed")
    shuffled = np.random.default_rng(0).permutation(ops)
    errors = np.zeros((_MOST_TREES // _TREES_STEP + 1, ops))
    for fold in range(_FOLDS):
        held_out = np.sort(shuffled[fold::_FOLDS])
        others = np.setdiff1d(shuffled, held_out)
        model = _fit(samples.take(others), _MOST_TREES, reuse_factors)
        tested = samples.take(held_out)
        for i, shorter in enumerate(_prefixes(model)):
            errors[i, held_out] = np.log(tested.predicted_us(shorter) / tested.measured_us)
    best = int(np.abs(errors).mean(axis=1).argmin())
    model = _fit(samples, best * _TREES_STEP, reuse_factors)
    return dataclasses.replace(model, interval_log=interval_log(-errors[best]))


def _fit(samples: LookupSamples, trees: int, reuse_factors: bool) -> LookupModel:
    columns = as_columns(samples.works)
    terms = op_terms(columns, samples.ops, samples.share_maps)
    ops = len(samples.measured_us)
    sums = np.stack([samples.sums(term) for term in terms.T], axis=1)
    matrix = np.concatenate([np.ones((ops, 1)), sums], axis=1)
    solution = nonnegative_relative(matrix, samples.measured_us)
    seen = tree_columns(columns)
    model = LookupModel(
        op_us=float(solution[0]),
        coefficients_us=solution[1:],
        trees=empty(),
        uses_reuse_factors=reuse_factors,
        interval_log=(0.0, 0.0),
        lowest=seen.min(axis=0),
        highest=seen.max(axis=0),
    )
    rows = residual_columns(columns, samples.reuse_factors if reuse_factors else None)
    return dataclasses.replace(
        model, trees=_boost(samples, rows, model, terms @ solution[1:], trees)
    )


def _boost(
    samples: LookupSamples, rows: Floats, model: LookupModel, analytic: Floats, count: int
) -> Trees:
    """Grows trees on the logarithm of measured / predicted, through the sum over an op's shards.

    A change v of a leaf's value moves the logarithm of an op by v times a share: the part of the
    op's time that the shards in the leaf have. All leaves of a tree are solved together
    (Gauss-Newton, ridge).
    """
    bins = Bins.of(rows)
    features, thresholds, values = [], [], []
    residual = np.zeros(len(rows))
    ops = len(samples.measured_us)
    for _ in range(count):
        times = analytic * np.exp(residual)
        predicted = model.op_us + samples.sums(times)
        error = np.log(samples.measured_us / predicted)
        # An outlier counts as an error at the limit does, not by its own size (Huber).
        limit = max(2.5 * 1.4826 * float(np.median(np.abs(error))), 1e-6)
        error = np.clip(error, -limit, limit)
        share = times / predicted[samples.op_of]
        feature, threshold, leaf = grow(
            bins, error[samples.op_of] * share, share, _DEPTH, least_weight=2.0
        )
        leaves = 2**_DEPTH
        moved = np.bincount(samples.op_of * leaves + leaf, share, ops * leaves)
        shares = moved.reshape(ops, leaves)
        ridge = shares.T @ shares + np.eye(leaves)
        value = _RATE * np.linalg.solve(ridge, shares.T @ error)
        residual = residual + value[leaf]
        features.append(feature)
        thresholds.append(threshold)
        values.append(value)
    if not features:
        return empty()
    # Six digits make a profile easier to read, and predict the same.
    return Trees(np.stack(features), _rounded(thresholds), _rounded(values))


def _rounded(rows: list[Floats]) -> Floats:
    rounded: Floats = np.stack(rows).astype(np.float64).round(6)
    return rounded


def _prefixes(model: LookupModel) -> list[LookupModel]:
    """Returns the model with 0, 20, 40 ... of its trees."""
    t = model.trees
    lengths = range(0, _MOST_TREES + 1, _TREES_STEP)
    shorter = [Trees(t.feature[:n], t.threshold[:n], t.value[:n]) for n in lengths]
    return [dataclasses.replace(model, trees=trees) for trees in shorter]
