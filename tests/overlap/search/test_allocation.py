"""Allocations beside every plan there is, and what they rest on."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from tests.overlap.search.every_plan import (
    finish,
    least,
    plans,
    random_layers,
    random_modes,
    traded_modes,
)
from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.search.allocation import allocate
from torchrec_bls.overlap.search.backward import Backward
from torchrec_bls.overlap.search.lower_bounds import LowerBounds
from torchrec_bls.overlap.search.timeline import Group, Layer, timeline

# Small backwards have many plans already: 5 layers of 2 modes have 30,000 with holds.
SHAPES = [(5, 1), (4, 2), (3, 3)]


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_better_than_an_allocation(shape: tuple[int, int]) -> None:
    for seed in range(250):
        draw = random.Random(f"{shape} {seed}")
        layers, modes = random_layers(draw, shape[0]), random_modes(draw, shape[1])
        groups = allocate(layers, modes)
        assert not any(group.hold for group in groups)
        found = timeline(layers, groups, modes).finish
        assert found == pytest.approx(least(layers, modes), rel=1e-9, abs=1e-9), seed


@pytest.mark.smoke
def test_nothing_is_better_than_an_allocation_of_few_layers() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        layers, modes = random_layers(draw, 3), random_modes(draw, 2)
        found = timeline(layers, allocate(layers, modes), modes).finish
        assert found == pytest.approx(least(layers, modes), rel=1e-9, abs=1e-9), seed


@pytest.mark.full
def test_more_layers_than_every_hold_can_be_tried_for() -> None:
    for seed in range(60):
        draw = random.Random(f"many {seed}")
        # Many plans are close to the best here: with `worth` at 0 most of these fail.
        layers = [Layer(draw.uniform(1, 20), draw.randint(1, 100)) for _ in range(8)]
        modes = traded_modes(draw) if seed % 3 else random_modes(draw, 2)
        found = timeline(layers, allocate(layers, modes), modes).finish
        assert found == pytest.approx(least(layers, modes, holds=False), rel=1e-9, abs=1e-9), seed


def test_where_overlap_costs_more_than_it_hides_one_group_at_the_end_is_best() -> None:
    # On shared cores: 1 us of compute and 1 of sending take 3 together.
    loopback = [ModeTimes(1.0, 0.1, 0.3, 1 / 3)]
    assert allocate([Layer(10.0, 100)] * 4, loopback) == [Group(4)]
    free = [ModeTimes(1.0, 0.1, 0.1, 1.0)]
    assert allocate([Layer(10.0, 100)] * 2, free) == [Group(1), Group(1)]


def test_modes_differ_where_that_pays() -> None:
    # The first is slow and leaves the backward alone, the second is fast and does not.
    modes = [ModeTimes(0.0, 0.1, 0.1, 1.0), ModeTimes(0.0, 0.01, 0.01, 0.1)]
    assert allocate([Layer(10.0, 100)] * 2, modes) == [Group(1, 0), Group(1, 1)]


def test_a_backward_that_goes_on_after_its_last_gradient_hides_it() -> None:
    layers = [Layer(1.0, 10), Layer(20.0, 0)]
    groups = allocate(layers, [ModeTimes(5.0, 1.0, 1.0, 1.0)])
    assert [group.layers for group in groups] == [1, 1]
    assert timeline(layers, groups, [ModeTimes(5.0, 1.0, 1.0, 1.0)]).finish == 21.0


def test_degenerate_backwards() -> None:
    mode = ModeTimes(1.0, 1.0, 1.0, 1.0)
    assert allocate([], [mode]) == []
    assert allocate([Layer(0.0, 0)], [mode]) == [Group(1)]
    assert timeline([Layer(0.0, 3)], allocate([Layer(0.0, 3)], [mode]), [mode]).finish == 4.0
    with pytest.raises(ValueError, match="at least one"):
        allocate([Layer(1.0, 1)], [])


def test_what_the_rules_rest_on() -> None:
    """V does not fall with what is computed and grows by `worth` at most; bounds are below it."""
    for seed in range(60):
        draw = random.Random(f"value {seed}")
        layers, modes = random_layers(draw, 4), random_modes(draw, 2)
        backward = Backward.of(layers, modes)
        bounds, end = LowerBounds(backward), float(backward.ready[-1])
        for sent in range(1, len(layers)):
            ready = float(backward.ready[sent])
            places = sorted({ready, end, *(draw.uniform(ready, end) for _ in range(6))})
            # What is computed already is a layer without gradients before those that are left.
            values = []
            for computed in places:
                rest = _after(layers, sent, computed)
                best = min(
                    finish(
                        rest, [Group(groups[0].layers + 1, *_how(groups[0])), *groups[1:]], modes
                    )
                    for groups in plans(len(rest) - 1, len(modes), holds=False)
                )
                values.append(best - sum(layer.compute_us for layer in rest))
            for (before, after), (low, high) in zip(
                pairwise(places), pairwise(values), strict=True
            ):
                slack = 1e-9
                assert low - slack <= high, seed
                assert high <= low + bounds.worth[sent] * (after - before) + slack, seed
            assert (bounds.at(sent, np.array(places)) <= np.array(values) + 1e-9).all(), seed


def _how(group: Group) -> tuple[int, int]:
    return group.mode, group.hold


def _after(layers: list[Layer], sent: int, computed: float) -> list[Layer]:
    """Returns the backward of which `sent` layers are sent and `computed` is done, as a new one."""
    done = [0.0]
    for layer in layers:
        done.append(done[-1] + layer.compute_us)
    rest = [Layer(computed, 0)]
    for number in range(sent, len(layers)):
        end, begin = max(done[number + 1], computed), max(done[number], computed)
        rest.append(Layer(end - begin, layers[number].bytes))
    return rest


def test_many_layers_and_modes() -> None:
    draw = np.random.default_rng(0)
    layers = [
        Layer(float(compute), int(size))
        for compute, size in zip(
            draw.exponential(100, 200), draw.lognormal(10, 2, 200), strict=True
        )
    ]
    rates = np.linspace(0.95, 0.6, 6)
    per_byte = np.linspace(0.002, 0.001, 6)
    modes = [ModeTimes(60.0, p, 1.2 * p, r) for p, r in zip(per_byte, rates, strict=True)]
    groups = allocate(layers, modes)
    assert sum(group.layers for group in groups) == 200
    best = timeline(layers, groups, modes).finish
    for mode in range(6):
        for count in (1, 5, 40, 200):
            assert best <= timeline(layers, [Group(count, mode)] * (200 // count), modes).finish
