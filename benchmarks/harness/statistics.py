"""Samples, and the statistics of every record and page."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from scipy import stats
from tqdm import tqdm

Sample = TypeVar("Sample")


class Spread(dict[str, float]):
    """Median of repeated measurements with quartiles and extremes, in the samples' unit.

    It keeps the samples as well, `values_in_order`, which a record has in its packed part.
    """

    def __init__(self, samples: Sequence[float]) -> None:
        if not len(samples):
            raise ValueError("no samples to summarize")
        low, q1, median, q3, high = map(float, np.quantile(samples, [0, 0.25, 0.5, 0.75, 1]))
        super().__init__(median=median, q1=q1, q3=q3, min=low, max=high)
        self.values_in_order = [float(sample) for sample in samples]

    def __reduce__(self) -> tuple[type["Spread"], tuple[list[float]]]:
        return Spread, (self.values_in_order,)


def taking_turns(
    samplers: Mapping[Any, Callable[[], Sample]], turns: int, title: str | None = None
) -> dict[Any, list[Sample]]:
    """Takes one sample of each in every turn, all in random order; with a title shows a bar.

    The order is another one in each turn, and the same on all ranks.
    """
    order, draw = list(samplers), random.Random(0)
    samples: dict[Any, list[Sample]] = {name: [] for name in order}
    hidden = title is None or (dist.is_initialized() and dist.get_rank() != 0)
    for _ in tqdm(range(turns), desc=title, unit="turn", disable=hidden):
        draw.shuffle(order)
        for name in order:
            samples[name].append(samplers[name]())
    return samples


def in_turns(
    samplers: Mapping[Any, Callable[[], float]], turns: int, title: str | None = None
) -> dict[Any, Spread]:
    """The spreads of `taking_turns`."""
    taken = taking_turns(samplers, turns, title)
    return {name: Spread(samples) for name, samples in taken.items()}


def mean_interval(samples: Sequence[float]) -> dict[str, float]:
    """Mean of independent measurements, and half of its 95 % interval by Student's t."""
    half = stats.t.ppf(0.975, len(samples) - 1) * stats.sem(samples) if len(samples) > 1 else 0.0
    return {"mean": float(np.mean(samples)), "ci95": float(half)}


def difference_interval(
    new: Mapping[str, float], old: Mapping[str, float], samples: int
) -> tuple[float, float, float]:
    """Low end, difference and high end of its 95 % interval by Welch's t.

    Args:
        new: what `mean_interval` returned of the new measurements.
        old: the same of the old ones.
        samples: number of measurements of each, at least two.
    """
    difference, freedom = new["mean"] - old["mean"], samples - 1
    errors = [each["ci95"] / stats.t.ppf(0.975, freedom) for each in (new, old)]
    variances = [error**2 for error in errors]
    if not sum(variances):
        return difference, difference, difference
    welch = sum(variances) ** 2 / sum(variance**2 / freedom for variance in variances)
    half = float(stats.t.ppf(0.975, welch)) * sum(variances) ** 0.5
    return difference - half, difference, difference + half


def geometric_mean(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Low end, geometric mean and high end of its 95 % interval, normal in the logarithm."""
    logs = np.log(ratios)
    half = stats.norm.ppf(0.975) * stats.sem(logs)
    low, mean, high = np.exp([logs.mean() - half, logs.mean(), logs.mean() + half])
    return float(low), float(mean), float(high)


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    found = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def ratio_of_medians(new: Sequence[float], old: Sequence[float]) -> tuple[float, float, float]:
    """Low end, ratio and high end of its 95 % interval by bootstrap."""

    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    found = stats.bootstrap(
        (new, old), ratio, n_resamples=2000, method="percentile", rng=0
    ).confidence_interval
    return float(found.low), float(np.median(new) / np.median(old)), float(found.high)
