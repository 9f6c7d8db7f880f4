"""The predicted times of backwards by plan and by default, with intervals."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from torchrec_bls.overlap.interval import Floats, Interval
from torchrec_bls.overlap.measured.dense_layers import DenseLayer
from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.modes.mode import Mode
from torchrec_bls.overlap.search.defaults import data_parallel, torchrec_data_parallel
from torchrec_bls.overlap.search.timeline import Group, Layer, Timeline, timeline

_DRAWS = 60
# Standard deviations of measured times from predicted ones beyond what samples show, as shares: of
# one bucket, and of several (docs/design/overlap.md).
_ONE, _SEVERAL = 0.03, 0.06
# A thread that waits so long for a core shares it with other ranks' threads.
_SCHEDULED_US = 1000


@dataclass(frozen=True)
class Prediction:
    """Milliseconds that a backward takes with its all-reduces, beside those of the defaults.

    Attributes:
        planned: time with the plan.
        ddp_default: time with DistributedDataParallel's buckets: 1 MiB, then 25 MiB.
        torchrec_default: time with TorchRec's buckets of 25 MiB.
        alone: time without all-reduces.
        gain_over_ddp: share of `ddp_default` that the plan saves.
        gain_over_torchrec: share of `torchrec_default` that the plan saves.
    """

    planned: Interval
    ddp_default: Interval
    torchrec_default: Interval
    alone: Interval
    gain_over_ddp: Interval
    gain_over_torchrec: Interval


def predict(
    layers: Sequence[DenseLayer],
    reduced_us: Sequence[float],
    groups: Sequence[Group],
    modes: Sequence[Mode],
) -> Prediction:
    """Returns the predicted times of backwards, by draws of the measured backwards and modes.

    Backwards with one all-reduce behind them have been measured. What they take more or less than
    predicted is added to every plan, or a third of it (docs/design/overlap.md).

    Intervals of times are for the median of as many backwards as were measured. Draws of modes
    alone would be too narrow. So three errors are drawn as well: a mode's on sizes that it was not
    fitted to, that of a median, and that of predictions beyond these. Gains have the first alone:
    the least gains cover the others.

    Args:
        layers: measured layers.
        reduced_us: measured times of one all-reduce of all gradients behind each backward.
        groups: planned groups of `layers`.
        modes: `modes_as_measured` that the groups travel by; the first is the defaults' mode.
    """
    random = np.random.default_rng(0)
    samples = np.array([layer.compute_us for layer in layers])
    whole = samples.sum(axis=0) + np.asarray(reduced_us)
    size = sum(layer.bytes for layer in layers)
    parameters = _of_parameters(layers, _typical_us(samples))
    defaults = data_parallel(parameters), torchrec_data_parallel(parameters)
    rows, compute_us = [], []
    for draw in range(_DRAWS):
        chosen = random.integers(len(whole), size=len(whole))
        compute = _typical_us(samples[:, chosen])
        times = [_drawn(mode, draw, random) for mode in modes]
        plain = [Layer(us, each.bytes) for us, each in zip(compute, layers, strict=True)]
        fine = _of_parameters(layers, compute)
        finish = [timeline(plain, groups, times).finish + times[0].hook_us]
        finish += [timeline(fine, own, times).finish for own in defaults]
        alone = float(compute.sum())
        in_place = float(np.median(whole[chosen])) - (alone + all_reduce_us(times[0], size))
        shares = [_counted(times[0], own) for own in (groups, *defaults)]
        # No backward with all-reduces is shorter than one without.
        rows.append(
            [max(alone, us + part * in_place) for us, part in zip(finish, shares, strict=True)]
        )
        compute_us.append(alone)
    typical = np.array(rows)
    error = [_SEVERAL if len(own) > 1 else _ONE for own in (groups, *defaults)]
    resampled = whole[random.integers(len(whole), size=(*typical.shape, len(whole)))]
    measured = typical * np.exp(random.normal(0, error, typical.shape))
    measured += np.median(resampled, axis=-1) - np.median(whole)
    gains = [Interval.of(1 - typical[:, 0] / by_default) for by_default in typical.T[1:]]
    intervals = [
        replace(Interval.of(each / 1e3), middle=float(np.median(middle)) / 1e3)
        for each, middle in zip(measured.T, typical.T, strict=True)
    ]
    return Prediction(
        planned=intervals[0],
        ddp_default=intervals[1],
        torchrec_default=intervals[2],
        alone=Interval.of(np.array(compute_us) / 1e3),
        gain_over_ddp=gains[0],
        gain_over_torchrec=gains[1],
    )


def modes_as_measured(
    modes: Sequence[Mode], layers: Sequence[DenseLayer], reduced_us: Sequence[float]
) -> tuple[Mode, ...]:
    """Returns calibrated modes with the times of all-reduces that were measured in place.

    Where ranks share cores, they stay as they are (docs/design/overlap.md).

    Args:
        modes: calibrated modes; the first is the defaults' mode.
        layers, reduced_us: measured, see `predict`.
    """
    first = modes[0].times
    calibrated_us = all_reduce_us(first, sum(layer.bytes for layer in layers))
    if _share_cores(first) or not calibrated_us:
        return tuple(modes)
    factor = float(np.median(reduced_us)) / calibrated_us
    return tuple(
        replace(
            mode,
            times=mode.times.slower(factor),
            draws=tuple(draw.slower(factor) for draw in mode.draws),
        )
        for mode in modes
    )


def _share_cores(times: ModeTimes) -> bool:
    return bool(times.wake_us > _SCHEDULED_US)


def _counted(times: ModeTimes, groups: Sequence[Group]) -> float:
    """Returns the part of what one all-reduce takes more than by its mode that counts for these
    groups."""
    return 1 / 3 if _share_cores(times) and len(groups) > 1 else 1.0


def _drawn(mode: Mode, draw: int, random: np.random.Generator) -> ModeTimes:
    """Returns a draw of a mode, with an error like its error on sizes that nothing was fitted
    to."""
    times = mode.draws[draw % len(mode.draws)] if mode.draws else mode.times
    if not mode.held_out_percent:
        return times
    # A normal distribution's mean absolute deviation is 0.8 of its standard deviation.
    off = float(np.exp(random.normal(0, mode.held_out_percent / 80)))
    longer = {name: off * value for name, value in asdict(times).items() if name != "compute_rate"}
    return replace(times, **longer)


def all_reduce_us(times: ModeTimes, size: int) -> float:
    """Returns the predicted time of one all-reduce of so many bytes behind a backward."""
    return float(times.behind_us + times.alone_us(size))


def typical_layers(layers: Sequence[DenseLayer]) -> list[Layer]:
    """Returns layers with their typical times."""
    compute = _typical_us(np.array([layer.compute_us for layer in layers]))
    return [Layer(float(us), each.bytes) for us, each in zip(compute, layers, strict=True)]


def default_timelines(
    layers: Sequence[DenseLayer], modes: Sequence[Mode]
) -> dict[str, tuple[list[Group], Timeline]]:
    """Returns groups and timelines of the defaults of DistributedDataParallel and TorchRec."""
    times = [mode.times for mode in modes]
    fine = _of_parameters(layers, _typical_us(np.array([each.compute_us for each in layers])))
    defaults = {
        "DistributedDataParallel's default": data_parallel(fine),
        "TorchRec's default": torchrec_data_parallel(fine),
    }
    return {name: (groups, timeline(fine, groups, times)) for name, groups in defaults.items()}


def _typical_us(samples: Floats) -> Floats:
    """Returns microseconds of each layer, of (layers, backwards).

    Medians of the layers together would be less than the median of whole backwards: a disturbance
    makes one layer longer, and another one each time.
    """
    medians = np.median(samples, axis=1)
    if not medians.any():
        return medians
    typical: Floats = medians * (np.median(samples.sum(axis=0)) / medians.sum())
    return typical


def _of_parameters(layers: Sequence[DenseLayer], compute_us: Floats) -> list[Layer]:
    """Returns a layer for each parameter: defaults may cut between any two parameters."""
    found = []
    for layer, us in zip(layers, compute_us, strict=True):
        first, *others = layer.sizes
        found += [Layer(float(us), first), *(Layer(0.0, size) for size in others)]
    return found
