"""Fits models of dense ops to measured ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dense.model import DenseModel, DenseOpModel
from ..dense.ops import DenseOp, terms
from .accuracy import gmae_percent
from .least_squares import nonnegative_relative

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


def dense_samples(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], DenseSamples]:
    """Collects measured ops by kind and direction, with the median of all repeats of each op.

    Args:
        records: records with `index`, the fields of `op`, and `times` as `measure_dense` returns
            them.
    """
    repeats: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    ops: dict[int, DenseOp] = {}
    for record in records:
        fields = {**record["op"], "gradient_bytes": tuple(record["op"]["gradient_bytes"])}
        ops[record["index"]] = DenseOp(**fields)
        for name, us in record["times"].items():
            repeats[record["index"], name.removesuffix("_us")] += us
    alike: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index, direction in repeats:
        alike[ops[index].kind, direction].append(index)
    return {
        (kind, direction): DenseSamples(
            tuple(ops[index] for index in indices),
            np.array([np.median(repeats[index, direction]) for index in indices]),
        )
        for (kind, direction), indices in alike.items()
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
