"""Fits how all-reduces and the backward beside them slow each other down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.sharding.costs.fitting.least_squares import nonnegative_relative

Floats = npt.NDArray[np.float64]

_LEAST_SIZES = 3
# A backward always goes on, if slowly.
_LEAST_RATE = 0.01


@dataclass(frozen=True)
class ModeSamples:
    """Measured all-reduces of one mode, in rounds over all sizes.

    Attributes:
        bytes: (n,) float64, sizes of gradients.
        alone_us: (rounds, n) float64, times of an all-reduce right behind another one, without a
            backward beside it.
        overlapped_us: (rounds, n) float64, times of an all-reduce right behind another one, beside
            a backward throughout.
        compute_rate: (rounds, n) float64, progress of that backward, as a share of its progress
            alone in the same time.
    """

    bytes: Floats
    alone_us: Floats
    overlapped_us: Floats
    compute_rate: Floats


def fit_mode(samples: ModeSamples) -> ModeTimes:
    """Fits the parameters to the median of each size over the rounds.

    A large all-reduce takes most of a backward's time, and its relative error counts more.

    Raises:
        ValueError: there are fewer than three sizes.
    """
    sizes = samples.bytes
    if len(sizes) < _LEAST_SIZES:
        raise ValueError(f"{len(sizes)} sizes of all-reduces; at least {_LEAST_SIZES} are needed")
    ones, none = np.ones_like(sizes), np.zeros_like(sizes)
    alone = np.stack([ones, sizes, none, none], axis=1)
    overlapped = np.stack([ones, none, sizes, ones], axis=1)
    measured = np.concatenate([_median(samples.alone_us), _median(samples.overlapped_us)])
    parameters = _fitted(np.concatenate([alone, overlapped]), measured)
    startup, alone_us, overlapped_us, added = map(float, parameters)
    took = _median(samples.overlapped_us)
    computed = took * _median(samples.compute_rate)
    more, rate = map(float, _fitted(np.stack([ones, took], axis=1), computed))
    return ModeTimes(startup, alone_us, overlapped_us, max(rate, _LEAST_RATE), added, more)


def _fitted(matrix: Floats, measured: Floats) -> Floats:
    fitted: Floats = nonnegative_relative(matrix, measured, long_ones_more=True)
    return fitted


def _median(rounds: Floats) -> Floats:
    median: Floats = np.median(rounds, axis=0)
    return median
