"""Timelines by hand, and beside a simulation that goes on in small steps."""

from __future__ import annotations

import random

import pytest

from tests.overlap.search.every_plan import finish, plans, random_layers, random_modes
from torchrec_bls.overlap.modes.contention import ModeTimes, Stage, stage
from torchrec_bls.overlap.search.timeline import Group, Layer, timeline

# Startup 2, 1 us a byte alone and 2 beside a backward, which goes on at half its pace.
SLOW = ModeTimes(2.0, 1.0, 2.0, 0.5)
FREE = ModeTimes(2.0, 1.0, 1.0, 1.0)


@pytest.mark.smoke
def test_stages_by_hand() -> None:
    # 12 beside the backward, of which 6 are done meanwhile.
    assert stage(SLOW, 5, 10.0) == Stage(12.0, 0.0, 4.0)
    # 3 of the backward take 6, half of the all-reduce; the other half of 7 follows.
    assert stage(SLOW, 5, 3.0) == Stage(6.0, 3.5, 0.0)
    assert stage(SLOW, 5, 0.0) == Stage(0.0, 7.0, 0.0)
    assert stage(SLOW, 0, 3.0) == Stage(0.0, 0.0, 3.0)


@pytest.mark.smoke
def test_timelines_by_hand() -> None:
    layers = [Layer(4.0, 5), Layer(3.0, 1), Layer(6.0, 2)]
    one = timeline(layers, [Group(3)], [FREE])
    assert (one.ready, one.begin, one.end, one.finish) == ((4, 7, 13), (13,), (23,), 23)
    # 4 to 11; the second waits for the first, 11 to 14; the third begins when that is done.
    three = timeline(layers, [Group(1), Group(1), Group(1)], [FREE])
    assert (three.begin, three.end, three.finish) == ((4, 11, 14), (11, 14, 18), 18)
    # Slowly: 12 from 4 on, in which 6 are computed, of the second layer 3 at 10; 3 are left at 16.
    # The second takes 4, the third layer is ready at 21 - alone from 20 on, since 2 were done.
    slow = timeline(layers, [Group(1), Group(1), Group(1)], [SLOW])
    assert slow.ready == (4, 10, 21)
    assert (slow.begin, slow.end, slow.finish) == ((4, 16, 21), (16, 20, 25), 25)
    held = timeline(layers, [Group(1, 0, hold=1), Group(2)], [FREE])
    assert (held.begin, held.end) == ((7, 14), (14, 19))


def test_groups_that_do_not_fit() -> None:
    layers = [Layer(1.0, 1)] * 3
    with pytest.raises(ValueError, match="2 layers of 3"):
        timeline(layers, [Group(2)], [FREE])
    with pytest.raises(ValueError, match="group 1 can't be of 3"):
        timeline(layers, [Group(1), Group(2, 0, 1)], [FREE])
    with pytest.raises(ValueError, match="group 0 can't be"):
        timeline(layers, [Group(0), Group(3)], [FREE])


def test_every_plan_finishes_as_the_equations_say() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        layers, modes = random_layers(draw, 4), random_modes(draw, 2)
        for groups in draw.choices(list(plans(len(layers), len(modes))), k=3):
            found = timeline(layers, groups, modes)
            assert found.finish == pytest.approx(finish(layers, groups, modes), rel=1e-12), seed
            assert sorted(found.ready) == list(found.ready)
            assert all(
                begin <= end + 1e-9 for begin, end in zip(found.begin, found.end, strict=True)
            )


def test_timelines_beside_small_steps() -> None:
    for seed in range(25):
        draw = random.Random(f"steps {seed}")
        layers, modes = random_layers(draw, 4), random_modes(draw, 2)
        groups = draw.choice(list(plans(len(layers), len(modes))))
        found = timeline(layers, groups, modes)
        step = max(found.finish, 1.0) / 20_000
        ready, begin, end = _small_steps(layers, groups, modes, step)
        # An event may be seen a step late, and each one after it as well.
        late = {"abs": 3 * step * (len(layers) + 2 * len(groups))}
        assert ready == pytest.approx(list(found.ready), **late), seed
        assert begin == pytest.approx(list(found.begin), **late), seed
        assert end == pytest.approx(list(found.end), **late), seed


def _small_steps(
    layers: list[Layer], groups: list[Group], modes: list[ModeTimes], step: float
) -> tuple[list[float], list[float], list[float]]:
    """Lets a backward and a queue of all-reduces go on for `step`, again and again."""
    total = sum(layer.compute_us for layer in layers)
    needed = [sum(layer.compute_us for layer in layers[: i + 1]) for i in range(len(layers))]
    ready: list[float] = []
    begin: list[float] = []
    end: list[float] = []
    now = computed = sent = 0.0
    while len(end) < len(groups) or len(ready) < len(layers):
        while len(ready) < len(layers) and computed >= needed[len(ready)] - 1e-9:
            ready.append(now)
        number = len(end)
        if number < len(groups) and len(begin) == number:
            last = sum(group.layers for group in groups[: number + 1]) + groups[number].hold
            if computed >= needed[last - 1] - 1e-9:
                begin.append(now)
                sent = 0.0
        computing = computed < total - 1e-9
        sending = len(begin) > len(end)
        rate = 1.0
        if sending:
            first = sum(group.layers for group in groups[:number])
            size = sum(layer.bytes for layer in layers[first : first + groups[number].layers])
            mode = modes[groups[number].mode]
            per_byte = mode.overlapped_us_per_byte if computing else mode.alone_us_per_byte
            startup = mode.startup_us + mode.added_startup_us * computing
            takes = startup + size * per_byte if size else 0.0
            sent = 1.0 if takes == 0 else sent + step / takes
            beside = mode.startup_us + mode.added_startup_us + size * mode.overlapped_us_per_byte
            rate = 1.0
            if size and beside:
                rate = mode.compute_rate + mode.added_compute_us / beside
            if sent >= 1 - 1e-9:
                end.append(now + (step if takes else 0.0))
        computed = min(total, computed + step * rate)
        now += step
    return ready, begin, end
