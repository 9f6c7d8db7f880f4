"""The paper's dynamic programming beside every plan on its grid, and its guarantee."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from benchmarks.libra.algorithm_1 import algorithm_1, allocate_modes
from tests.overlap.search.every_plan import (
    finish,
    fusions,
    random_layers,
    random_modes,
)
from torchrec_bls.overlap.modes.contention import ModeTimes, stage
from torchrec_bls.overlap.search.allocation import allocate
from torchrec_bls.overlap.search.timeline import Group, Layer, timeline


def _on_grid(
    layers: list[Layer], groups: list[Group], modes: list[ModeTimes], chunks: int
) -> float:
    """Returns the best finish of groups that begin at edges of chunks, whichever: Eqs. 17 to 19."""
    width = sum(layer.compute_us for layer in layers) / chunks
    best = math.inf

    def go_on(number: int, last: int, edge: int, time: float) -> None:
        nonlocal best
        if number == len(groups):
            if edge == chunks:
                best = min(best, time)
            return
        group = groups[number]
        last += group.layers
        size = sum(layer.bytes for layer in layers[last - group.layers : last])
        ready = sum(layer.compute_us for layer in layers[:last])
        for begin in range(edge, chunks + 1):
            if begin * width < ready - 1e-9:
                continue
            waited = time + (begin - edge) * width
            part = stage(modes[group.mode], size, (chunks - begin) * width)
            done = (chunks * width - part.compute_left_us) / width if width else 0.0
            after = waited + part.overlap_us + part.communication_us
            if part.communication_us or not width:
                go_on(number + 1, last, chunks, after)
                continue
            following = min(math.ceil(done - 1e-9), chunks)
            go_on(number + 1, last, following, after + (following - done) * width)

    go_on(0, 0, 0, 0.0)
    return best


def _searched(layers: list[Layer], modes: list[ModeTimes], most: int, chunks: int) -> float:
    return min(
        _on_grid(layers, [Group(n, m) for n, m in zip(sizes, chosen, strict=True)], modes, chunks)
        for sizes in fusions(len(layers))
        if len(sizes) <= most
        for chosen in product(range(len(modes)), repeat=len(sizes))
    )


def test_plans_are_the_best_on_the_grid() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        layers, modes = random_layers(draw, 4), random_modes(draw, 2)
        chunks, most = draw.randint(1, 7), draw.randint(1, 4)
        groups = algorithm_1(layers, modes, groups=most, chunks=chunks)
        assert len(groups) <= most
        assert sum(group.layers for group in groups) == len(layers)
        found = _on_grid(layers, groups, modes, chunks)
        assert found == pytest.approx(_searched(layers, modes, most, chunks), rel=1e-9), seed


def test_modes_of_given_groups_are_the_best_on_the_grid() -> None:
    for seed in range(150):
        draw = random.Random(f"modes {seed}")
        layers, modes = random_layers(draw, 4), random_modes(draw, 3)
        fusion = draw.choice(list(fusions(len(layers))))
        chunks = draw.randint(1, 7)
        groups = allocate_modes(layers, fusion, modes, chunks=chunks)
        assert tuple(group.layers for group in groups) == fusion
        best = min(
            _on_grid(
                layers,
                [Group(n, m) for n, m in zip(fusion, chosen, strict=True)],
                modes,
                chunks,
            )
            for chosen in product(range(len(modes)), repeat=len(fusion))
        )
        assert _on_grid(layers, groups, modes, chunks) == pytest.approx(best, rel=1e-9), seed


def _assumed(draw: random.Random, count: int) -> list[ModeTimes]:
    """Returns modes that fulfil Assumptions 2 and 3."""
    modes = []
    for _ in range(count):
        alone, slower = draw.uniform(0.01, 0.3), draw.uniform(1, 2.5)
        rate = draw.uniform(1 - 1 / slower, 1.0)
        modes.append(ModeTimes(draw.uniform(0, 5), alone, alone * slower, rate))
    return modes


def test_the_guarantee_holds_where_the_assumptions_do() -> None:
    largest = 0.0
    for seed in range(150):
        draw = random.Random(f"guarantee {seed}")
        layers, modes = random_layers(draw, 5), _assumed(draw, 2)
        chunks, most = draw.randint(2, 8), draw.randint(1, 5)
        groups = algorithm_1(layers, modes, groups=most, chunks=chunks)
        best = min(
            finish(layers, [Group(n, m) for n, m in zip(sizes, chosen, strict=True)], modes)
            for sizes in fusions(len(layers))
            if len(sizes) <= most
            for chosen in product(range(len(modes)), repeat=len(sizes))
        )
        over = timeline(layers, groups, modes).finish - best
        assert over <= ((most - 1) / chunks + 1e-9) * best + 1e-9, seed
        largest = max(largest, over / best if best else 0.0)
    # The grid costs something, and far less than what is guaranteed.
    assert largest > 0.001


def test_a_fine_grid_is_nearly_the_optimum() -> None:
    for seed in range(10):
        draw = random.Random(f"fine {seed}")
        layers, modes = random_layers(draw, 12), _assumed(draw, 3)
        groups = algorithm_1(layers, modes, groups=len(layers), chunks=2000)
        best = timeline(layers, allocate(layers, modes), modes).finish
        found = timeline(layers, groups, modes).finish
        assert best - 1e-9 <= found <= best * (1 + len(layers) / 2000) + 1e-9


def test_what_makes_no_plan() -> None:
    mode = ModeTimes(1.0, 1.0, 1.0, 1.0)
    assert algorithm_1([], [mode]) == [] == allocate_modes([], [], [mode])
    for arguments in ({"groups": 0}, {"chunks": 0}):
        with pytest.raises(ValueError, match="at least one"):
            algorithm_1([Layer(1.0, 1)], [mode], **arguments)
    with pytest.raises(ValueError, match="are not 3"):
        allocate_modes([Layer(1.0, 1)] * 3, [1, 1], [mode])
