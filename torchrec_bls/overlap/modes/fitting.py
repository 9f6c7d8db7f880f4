"""Fits how all-reduces and the backward beside them slow each other down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.sharding.costs.fitting.least_squares import nonnegative_relative

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

#: Of resampled measurements, for intervals of 90 %.
DRAWS = 40

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
        behind_us: (rounds, n) float64, times of an all-reduce right behind a backward.
        wake_us: (rounds, n) float64, times until an all-reduce beside a backward begins, if none
            runs before.
        cold_us: (rounds, n) float64, how much longer this one takes than the ones behind it.
        hook_us: (rounds, n) float64, times that it takes more if another thread makes all-reduces.
        overlapped_us: (rounds, n) float64, times of an all-reduce right behind another one, beside
            a backward throughout.
        compute_rate: (rounds, n) float64, progress of that backward, as a share of its progress
            alone in the same time.
    """

    bytes: Floats
    alone_us: Floats
    behind_us: Floats
    wake_us: Floats
    cold_us: Floats
    hook_us: Floats
    overlapped_us: Floats
    compute_rate: Floats

    def of_rounds(self, rounds: Integers) -> ModeSamples:
        """Returns the samples of some rounds; a round may come several times."""
        return ModeSamples(self.bytes, *(each[rounds] for each in self._times()))

    def of_sizes(self, sizes: Integers) -> ModeSamples:
        """Returns the samples of some sizes; a size may come several times."""
        return ModeSamples(self.bytes[sizes], *(each[:, sizes] for each in self._times()))

    def _times(self) -> tuple[Floats, ...]:
        late = (self.behind_us, self.wake_us, self.cold_us, self.hook_us)
        return self.alone_us, *late, self.overlapped_us, self.compute_rate


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
    rate = max(rate, _LEAST_RATE)
    behind_us = samples.behind_us - samples.alone_us
    late = (behind_us, samples.wake_us, samples.cold_us, samples.hook_us)
    late_us = (max(0.0, float(np.median(_median(each)))) for each in late)
    return ModeTimes(startup, alone_us, overlapped_us, rate, added, more, *late_us)


def draw_modes(samples: ModeSamples, draws: int = DRAWS, seed: int = 0) -> tuple[ModeTimes, ...]:
    """Fits to resampled rounds and sizes (bootstrap).

    Rounds are resampled since times differ between rounds. Sizes are resampled since the times are
    not quite a straight line of the size. The draws show how much the choice of sizes counts.
    """
    random = np.random.default_rng(seed)
    rounds, sizes = samples.alone_us.shape
    fitted: list[ModeTimes] = []
    while len(fitted) < draws:
        of_sizes = np.sort(random.integers(sizes, size=sizes))
        if len(np.unique(of_sizes)) < _LEAST_SIZES:
            continue
        of_rounds = np.asarray(random.integers(rounds, size=rounds))
        drawn = samples.of_rounds(of_rounds).of_sizes(of_sizes)
        fitted.append(fit_mode(drawn))
    return tuple(fitted)


def held_out_percent(samples: ModeSamples) -> float:
    """Returns how far all-reduces of a size, alone and not, are from a fit to all other sizes.

    Returns:
        The mean of the absolute relative errors, per cent, weighted as the fit weights them.

    Raises:
        ValueError: there are fewer than four sizes.
    """
    count = len(samples.bytes)
    predicted, measured = [], []
    for size in range(count):
        times = fit_mode(samples.of_sizes(np.delete(np.arange(count), size)))
        for us, rounds in (
            (times.alone_us, samples.alone_us),
            (times.overlapped_us, samples.overlapped_us),
        ):
            predicted.append(us(samples.bytes[size]))
            measured.append(float(np.median(rounds[:, size])))
    took = np.asarray(measured)
    errors = np.abs(np.asarray(predicted) / took - 1)
    return 100 * float(np.average(errors, weights=np.sqrt(took)))


def _fitted(matrix: Floats, measured: Floats) -> Floats:
    fitted: Floats = nonnegative_relative(matrix, measured, long_ones_more=True)
    return fitted


def _median(rounds: Floats) -> Floats:
    median: Floats = np.median(rounds, axis=0)
    return median
