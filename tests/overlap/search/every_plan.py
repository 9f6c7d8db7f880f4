"""Every fusion x mode x hold of small backwards, without the package's own timeline."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.search.timeline import Group, Layer


def fusions(layers: int) -> Iterator[tuple[int, ...]]:
    """Yields how many layers each group has."""
    for cuts in product((False, True), repeat=max(layers - 1, 0)):
        sizes = [1]
        for cut in cuts:
            if cut:
                sizes.append(1)
            else:
                sizes[-1] += 1
        yield tuple(sizes)


def finish(layers: Sequence[Layer], groups: Sequence[Group], modes: Sequence[ModeTimes]) -> float:
    """Returns when a plan is done: Eqs. 8 to 15 with the names of the paper."""
    total = sum(layer.compute_us for layer in layers)
    time = processed = 0.0
    last = 0
    for group in groups:
        first, last = last, last + group.layers
        ready = sum(layer.compute_us for layer in layers[: last + group.hold])
        if processed < ready:
            time, processed = time + ready - processed, ready
        size = sum(layer.bytes for layer in layers[first:last])
        mode = modes[group.mode]
        b = total - processed
        if size == 0:
            continue
        p = size * mode.overlapped_us_per_byte + mode.startup_us + mode.added_startup_us
        q = size * mode.alone_us_per_byte + mode.startup_us
        done = p * mode.compute_rate + (mode.added_compute_us if p else 0.0)
        g = b * p / done if p else b
        overlap = min(p, g)
        rest_of_compute = b * (1 - overlap / g) if g else 0.0
        rest_of_sending = q * (1 - overlap / p) if p else 0.0
        time += overlap + rest_of_sending
        processed = total - rest_of_compute
    return time + total - processed


def plans(layers: int, modes: int, *, holds: bool = True) -> Iterator[list[Group]]:
    """Yields all of them."""
    for fusion in fusions(layers):
        ends = [sum(fusion[: number + 1]) for number in range(len(fusion))]
        most = [layers - end if holds else 0 for end in ends]
        choices = [product(range(modes), range(held + 1)) for held in most]
        for chosen in product(*choices):
            yield [
                Group(size, mode, hold) for size, (mode, hold) in zip(fusion, chosen, strict=True)
            ]


def least(layers: Sequence[Layer], modes: Sequence[ModeTimes], **limits: bool) -> float:
    """Returns the earliest finish of all plans."""
    found = plans(len(layers), len(modes), **limits)
    return min(finish(layers, groups, modes) for groups in found)


def random_layers(draw: random.Random, most: int) -> list[Layer]:
    """Returns a backward, with layers that have no gradients, take no time, or are alike."""
    if draw.random() < 0.15:
        return [Layer(3.0, 50)] * draw.randint(1, most)
    return [
        Layer(
            0.0 if draw.random() < 0.15 else draw.choice([1.0, 2.0, draw.uniform(0, 20)]),
            0 if draw.random() < 0.2 else draw.randint(1, 200),
        )
        for _ in range(draw.randint(1, most))
    ]


def traded_modes(draw: random.Random) -> list[ModeTimes]:
    """Returns a slow mode that leaves the backward alone, and a fast one that does not."""
    startup, per_byte = draw.uniform(0, 4), draw.uniform(0.05, 0.25)
    return [
        ModeTimes(startup, alone, alone * draw.uniform(1, 1.3), draw.uniform(*rates))
        for alone, rates in ((2 * per_byte, (0.9, 1.0)), (per_byte, (0.4, 0.8)))
    ]


def random_modes(draw: random.Random, most: int) -> list[ModeTimes]:
    """Returns modes of which some break Assumption 2, and many Assumption 3."""
    if most > 1 and draw.random() < 0.3:
        return traded_modes(draw)
    found = []
    for _ in range(draw.randint(1, most)):
        alone = draw.choice([0.0, 0.1, draw.uniform(0, 0.4)])
        slower = draw.choice([1.0, draw.uniform(1, 4), draw.uniform(0.4, 1)])
        rate = draw.choice([1.0, 0.5, draw.uniform(0.05, 1.0), draw.uniform(1.0, 1.2)])
        startup, *added = (draw.choice([0.0, 1.0, draw.uniform(0, 8)]) for _ in range(3))
        found.append(ModeTimes(startup, alone, alone * slower, rate, *added))
    return found
