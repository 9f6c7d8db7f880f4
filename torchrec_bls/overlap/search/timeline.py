"""When gradients of a backward are ready, and when their all-reduces run (LIBRA, sec. III-B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_bls.overlap.modes.contention import ModeTimes, stage


@dataclass(frozen=True)
class Layer:
    """A part of the backward, at whose end gradients are ready.

    Attributes:
        compute_us: microseconds of its backward, with nothing beside it.
        bytes: bytes of its gradients; 0 if it has none.
    """

    compute_us: float
    bytes: int


@dataclass(frozen=True)
class Group:
    """Layers whose gradients travel together.

    Attributes:
        layers: number of layers, after those of the group before.
        mode: number of the mode by which they travel.
        hold: number of further layers to be done before the group may begin. It is 0, unless
            running beside the backward costs more than it hides.
    """

    layers: int
    mode: int = 0
    hold: int = 0


@dataclass(frozen=True)
class Timeline:
    """A backward with its all-reduces, microseconds from its beginning.

    Attributes:
        ready: time when each layer's gradients are there.
        begin: begin of each group's all-reduce.
        end: end of each group's all-reduce.
        finish: time when backward and all-reduces are done.
    """

    ready: tuple[float, ...]
    begin: tuple[float, ...]
    end: tuple[float, ...]
    finish: float


def timeline(
    layers: Sequence[Layer], groups: Sequence[Group], modes: Sequence[ModeTimes]
) -> Timeline:
    """Returns when everything runs: all-reduces one after the other, each as soon as it may.

    Args:
        layers: layers in the order in which their gradients are ready.
        groups: groups in order; together they have all layers.
        modes: modes that the groups name.

    Raises:
        ValueError: the groups have another number of layers, or one holds for too many.
    """
    if sum(group.layers for group in groups) != len(layers):
        raise ValueError(
            f"groups have {sum(group.layers for group in groups)} layers of {len(layers)}"
        )
    done = [0.0]
    for layer in layers:
        done.append(done[-1] + layer.compute_us)
    ready: list[float] = []
    begins, ends = [], []
    now, computed, last = 0.0, 0.0, 0

    def advance(until: float, rate: float) -> None:
        """Runs the backward on, to `until` of its own time."""
        nonlocal now, computed
        while len(ready) < len(layers) and done[len(ready) + 1] <= until + 1e-9:
            ready.append(now + (done[len(ready) + 1] - computed) / rate)
        now += (until - computed) / rate
        computed = until

    for number, group in enumerate(groups):
        first, last = last, last + group.layers
        if group.layers < 1 or not last <= last + group.hold <= len(layers):
            raise ValueError(f"group {number} can't be of {len(layers)} layers: {group}")
        advance(max(computed, done[last + group.hold]), 1.0)
        begins.append(now)
        size = sum(layer.bytes for layer in layers[first:last])
        times = modes[group.mode]
        part = stage(times, size, done[-1] - computed)
        advance(done[-1] - part.compute_left_us, times.rate(size))
        now += part.communication_us
        ends.append(now)
    advance(done[-1], 1.0)
    return Timeline(tuple(ready), tuple(begins), tuple(ends), now)
