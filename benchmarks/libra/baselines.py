"""What LIBRA is compared with: groups by other methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.search.allocation import allocate
from torchrec_bls.overlap.search.timeline import Group, Layer, timeline


def no_overlap(layers: Sequence[Layer], mode: int) -> list[Group]:
    """Returns one group, which is ready at the end: SynEASGD (LIBRA's SE)."""
    return [Group(len(layers), mode)] if layers else []


def mg_wfbp(layers: Sequence[Layer], modes: Sequence[ModeTimes], mode: int = 0) -> list[Group]:
    """Returns the groups of MG-WFBP, which ignores contention (S. Shi et al., IEEE TPDS 32(8)).

    It goes layer by layer. Gradients that could begin to travel wait for the next layer's in one
    case: the next layer's are there before the former would have arrived, and sooner than a startup
    takes. That is the better choice for this pair of layers, and not always part of the best plan.
    """
    times = modes[mode]
    groups: list[Group] = []
    ready = free = 0.0
    count, size = 0, 0
    for layer in layers:
        ready += layer.compute_us
        if size:
            begin = max(free, ready - layer.compute_us)
            arrived = begin + times.startup_us + size * times.alone_us_per_byte
            saved = times.startup_us if layer.bytes else 0.0
            if not (ready < arrived and ready - begin < saved):
                groups.append(Group(count, mode))
                free, count, size = arrived, 0, 0
        count, size = count + 1, size + layer.bytes
    return [*groups, Group(count, mode)] if count else groups


def best_single_mode(layers: Sequence[Layer], modes: Sequence[ModeTimes]) -> list[Group]:
    """Returns the best fusion of all those whose groups have one mode, for the best mode."""
    plans = [
        [replace(group, mode=number) for group in allocate(layers, [mode])]
        for number, mode in enumerate(modes)
    ]
    return min(plans, key=lambda groups: timeline(layers, groups, modes).finish)
