"""Fits models of dense ops to measured ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torchrec_bls.sharding.costs.fitting.accuracy import gmae_percent
from torchrec_bls.sharding.costs.fitting.least_squares import nonnegative_relative

from benchmarks.simulator.dense.model import DenseModel, DenseOpModel
from benchmarks.simulator.dense.ops import DenseOp, terms

Floats = npt.NDArray[np.float64]

_FOLDS = 5


@dataclass(frozen=True)
class DenseSamples:
    """Measured ops of one kind in one direction.

    Attributes:
        ops: the n ops.
        measured_us: (n,) float64, positive.
    """

    ops: tuple[DenseOp, ...]
    measured_us: Floats


def dense_samples(
    ops: Sequence[DenseOp], times: Sequence[dict[str, list[float]]]
) -> dict[tuple[str, str], DenseSamples]:
    """Collects measured ops by kind and direction, with the median of all repeats of each op.

    Args:
        ops: ops.
        times: what `measure_dense` returns for them.
    """
    alike: defaultdict[tuple[str, str], list[tuple[DenseOp, float]]] = defaultdict(list)
    for op, by_direction in zip(ops, times, strict=True):
        for name, us in by_direction.items():
            alike[op.kind, name.removesuffix("_us")].append((op, float(np.median(us))))
    return {
        key: DenseSamples(tuple(op for op, _ in each), np.array([us for _, us in each]))
        for key, each in alike.items()
    }


def fit_dense(
    samples: dict[tuple[str, str], DenseSamples], cache_bytes: Sequence[float]
) -> DenseModel:
    """Fits each kind and direction by relative least squares.

    Args:
        samples: samples by kind and direction.
        cache_bytes: sizes of caches; an op that touches more bytes takes longer.

    Raises:
        ValueError: a kind has fewer ops than folds.
    """
    kinds = {
        key: DenseOpModel(
            _fit(*key, each, cache_bytes),
            round(
                gmae_percent(held_out_us(*key, each, cache_bytes), each.measured_us),
                2,
            ),
        )
        for key, each in samples.items()
    }
    return DenseModel(tuple(cache_bytes), kinds)


def held_out_us(
    kind: str, direction: str, samples: DenseSamples, cache_bytes: Sequence[float]
) -> Floats:
    """Predicts each op by a model that is fitted to the four fifths of all ops without it.

    Returns:
        (n,) float64 microseconds.

    Raises:
        ValueError: there are fewer ops than folds.
    """
    ops = len(samples.ops)
    if ops < _FOLDS:
        raise ValueError(f"{ops} measured {direction}s of {kind}; at least {_FOLDS} are needed")
    columns = terms(kind, direction, samples.ops, cache_bytes)
    predicted = np.zeros(ops)
    shuffled = np.random.default_rng(0).permutation(ops)
    for fold in range(_FOLDS):
        held_out = shuffled[fold::_FOLDS]
        others = np.setdiff1d(shuffled, held_out)
        solution = nonnegative_relative(columns[others], samples.measured_us[others])
        predicted[held_out] = columns[held_out] @ solution
    return predicted


def _fit(kind: str, direction: str, samples: DenseSamples, cache_bytes: Sequence[float]) -> Floats:
    columns = terms(kind, direction, samples.ops, cache_bytes)
    return nonnegative_relative(columns, samples.measured_us)
