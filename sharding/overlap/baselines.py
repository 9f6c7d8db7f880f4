"""Plans that other methods make, to compare an allocation with: the groups of a backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..costs.contention import RANKS_OWN_TIMES, ModeTimes
from ..simulation.data_parallel import BUCKET_BYTES, FIRST_BUCKET_BYTES, buckets_of
from .allocation import allocate
from .timeline import Group, Layer, timeline

#: Bytes, of which `best_single_cap` tries all: 1/4 MiB to 256 MiB.
CAPS = tuple(2**exponent for exponent in range(18, 29))


def no_overlap(layers: Sequence[Layer], mode: int = 0) -> list[Group]:
    """Returns one group, which is ready at the end: SynEASGD (LIBRA's SE)."""
    return [Group(len(layers), mode)] if layers else []


def data_parallel(layers: Sequence[Layer], mode: int = 0) -> list[Group]:
    """Returns torch's DistributedDataParallel by default: a first bucket of 1 MiB, others of 25."""
    return _buckets(layers, FIRST_BUCKET_BYTES, BUCKET_BYTES, mode)


def torchrec_data_parallel(layers: Sequence[Layer], mode: int = 0) -> list[Group]:
    """Returns TorchRec's wrapper by default: its bucket_cap_mb of 25 is the first bucket's too."""
    return _buckets(layers, BUCKET_BYTES, BUCKET_BYTES, mode)


def best_single_cap(
    layers: Sequence[Layer],
    modes: Sequence[ModeTimes],
    mode: int = 0,
    caps: Sequence[int] = CAPS,
) -> list[Group]:
    """Returns the best plan that one bucket_cap_mb gives, as a user may tune it."""
    plans = [_buckets(layers, cap, cap, mode) for cap in caps]
    return min(plans, key=lambda groups: timeline(layers, groups, modes).finish)


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
    late = {name: getattr(modes[0], name) for name in RANKS_OWN_TIMES}
    plans = []
    for number, mode in enumerate(modes):
        alone = [replace(mode, **late)]
        plans.append([replace(group, mode=number) for group in allocate(layers, alone)])
    return min(plans, key=lambda groups: timeline(layers, groups, modes).finish)


def _buckets(layers: Sequence[Layer], first: int, others: int, mode: int) -> list[Group]:
    buckets = buckets_of([layer.bytes for layer in layers], first, others)
    return [Group(len(bucket), mode) for bucket in buckets]
