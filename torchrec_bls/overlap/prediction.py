"""Backwards as they are predicted by a plan and by default: enough to say what is worth a trial."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchrec_bls.overlap.measured.dense_layers import DenseLayer
from torchrec_bls.overlap.modes.mode import Mode
from torchrec_bls.overlap.search.defaults import data_parallel, torchrec_data_parallel
from torchrec_bls.overlap.search.timeline import Group, Layer, Timeline, timeline


@dataclass(frozen=True)
class PredictedBackward:
    """A backward with its all-reduces.

    Attributes:
        groups: layers whose gradients travel together.
        timeline: when they are ready and travel.
    """

    groups: Sequence[Group]
    timeline: Timeline


@dataclass(frozen=True)
class Prediction:
    """Backwards of a model, all-reduces as slow as they were behind its measured backwards.

    Attributes:
        planned: with the plan.
        ddp_default: with DistributedDataParallel's buckets: 1 MiB, then 25 MiB.
        torchrec_default: with TorchRec's buckets of 25 MiB.
        alone_us: time without all-reduces.
    """

    planned: PredictedBackward
    ddp_default: PredictedBackward
    torchrec_default: PredictedBackward
    alone_us: float

    @property
    def gain_over_ddp(self) -> float:
        """Returns the share of DistributedDataParallel's time that the plan saves."""
        return 1 - self.planned.timeline.finish / self.ddp_default.timeline.finish

    @property
    def gain_over_torchrec(self) -> float:
        """Returns the share of TorchRec's time that the plan saves."""
        return 1 - self.planned.timeline.finish / self.torchrec_default.timeline.finish


def predict(
    layers: Sequence[DenseLayer],
    reduced_us: Sequence[float],
    groups: Sequence[Group],
    modes: Sequence[Mode],
) -> Prediction:
    """Returns the backwards by a plan and by default.

    Args:
        layers: measured layers.
        reduced_us: measured times of one all-reduce of all gradients behind each backward.
        groups: planned groups of `layers`.
        modes: calibrated modes that the groups travel by; the first is the defaults' mode.
    """
    times = [mode.times for mode in modes_as_measured(modes, layers, reduced_us)]
    typical = typical_layers(layers)
    of_parameters = _of_parameters(layers, typical)

    def backward(of: Sequence[Layer], groups: Sequence[Group]) -> PredictedBackward:
        return PredictedBackward(groups, timeline(of, groups, times))

    return Prediction(
        backward(typical, groups),
        backward(of_parameters, data_parallel(of_parameters)),
        backward(of_parameters, torchrec_data_parallel(of_parameters)),
        sum(layer.compute_us for layer in typical),
    )


def modes_as_measured(
    modes: Sequence[Mode], layers: Sequence[DenseLayer], reduced_us: Sequence[float]
) -> tuple[Mode, ...]:
    """Returns calibrated modes, all-reduces so many times as slow as the measured ones were.

    Args:
        modes: calibrated modes; the first is the defaults' mode.
        layers, reduced_us: measured, see `predict`.
    """
    calibrated_us = modes[0].times.alone_us(sum(layer.bytes for layer in layers))
    if not calibrated_us:
        return tuple(modes)
    factor = float(np.median(reduced_us)) / calibrated_us
    return tuple(replace(mode, times=mode.times.slower(factor)) for mode in modes)


def typical_layers(layers: Sequence[DenseLayer]) -> list[Layer]:
    """Returns layers with their typical times.

    Medians of the layers together would be less than the median of whole backwards: a disturbance
    makes one layer longer, and another one each time.
    """
    samples = np.array([layer.compute_us for layer in layers])
    compute_us = np.median(samples, axis=1)
    if compute_us.any():
        compute_us *= np.median(samples.sum(axis=0)) / compute_us.sum()
    return [Layer(float(us), each.bytes) for us, each in zip(compute_us, layers, strict=True)]


def _of_parameters(layers: Sequence[DenseLayer], typical: Sequence[Layer]) -> list[Layer]:
    """Returns a layer for each parameter: defaults may cut between any two parameters."""
    found = []
    for layer, whole in zip(layers, typical, strict=True):
        first, *others = layer.sizes
        found += [Layer(whole.compute_us, first), *(Layer(0.0, size) for size in others)]
    return found
