"""Codecs compared by simulation, and the one that is worth it."""

from __future__ import annotations

from typing import Any

import pytest
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.simulation.bounds import BoundOutcome, Simulation, simulate_bounds
from torchrec_bls.sharding.simulation.choose_codec import choose_codec
from torchrec_bls.sharding.simulation.delays import read_delays
from torchrec_bls.sharding.simulation.program import Ranks
from torchrec_bls.sharding.simulation.wire.codecs import FP32, CodecCosts

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy

# Encoding and decoding take longer than the copies that they save.
CODECS = [
    FP32,
    CodecCosts("uint8", 1.0, 8.0, 0.002, 0.002),
    CodecCosts("uint4", 0.5, 8.0, 0.002, 0.002),
]


def simulated(link_bytes_per_us: float | None) -> list[BoundOutcome]:
    costs, workload = AdditiveTestCosts(), random_workload(3, 6)
    job = roomy(4, training=False, ranks_per_host=2)
    plan = search(make_problem(workload, job, costs)).plan
    ranks = Ranks.on_hosts(4, 2, 2, link_bytes_per_us=link_bytes_per_us)
    simulation = Simulation(ranks, read_delays("uniform:0-1ms"), 60, codecs=CODECS)
    return simulate_bounds(plan, workload, job, costs, [0, 2], simulation)


def test_codecs_are_worth_it_on_slow_links_alone() -> None:
    slow, fast, none = simulated(1.0), simulated(1e6), simulated(None)
    assert [(each.codec, each.bound) for each in slow] == [
        (codec, bound) for codec in ("fp32", "uint8", "uint4") for bound in (0, 2)
    ]
    assert choose_codec(slow).codec == "uint4"
    assert choose_codec(fast).codec == "fp32"
    assert choose_codec(none).codec == "fp32"


def outcome(codec: str, bound: int, step: float, memory: float = 1.0) -> BoundOutcome:
    nothing: Any = None
    return BoundOutcome(bound, step, (step, step, step), step, memory, nothing, codec)


@pytest.mark.parametrize(
    ("outcomes", "chosen"),
    [
        # float32 is 2.9 % slower, then 3 %.
        ([("fp32", 0, 102.9), ("uint8", 0, 100.0)], ("fp32", 0)),
        ([("fp32", 0, 103.0), ("uint8", 0, 100.0)], ("uint8", 0)),
        # Among codecs that round the fastest, by however little.
        ([("fp32", 0, 200.0), ("uint8", 0, 100.0), ("uint4", 0, 99.9)], ("uint4", 0)),
        ([("uint8", 0, 100.0), ("uint4", 0, 100.1)], ("uint8", 0)),
        # The bound of each codec is the one that `choose_bound` takes.
        ([("fp32", 0, 110.0), ("uint8", 0, 102.0), ("uint8", 4, 100.0)], ("uint8", 0)),
        ([("fp32", 0, 300.0), ("fp32", 4, 101.0), ("uint8", 0, 100.0)], ("fp32", 4)),
        # Out of the limits.
        ([("fp32", 0, 100.0, 9.0), ("uint8", 0, 200.0), ("uint8", 4, 100.0, 9.0)], ("uint8", 0)),
    ],
)
def test_float32_unless_another_is_three_per_cent_faster(
    outcomes: list[tuple[Any, ...]], chosen: tuple[str, int]
) -> None:
    found = choose_codec([outcome(*each) for each in outcomes], max_memory_bytes=2.0)
    assert (found.codec, found.bound) == chosen


def test_one_codec_is_no_choice() -> None:
    with pytest.raises(
        ValueError, match="choosing a codec needs at least two, but there is only fp32"
    ):
        choose_codec([outcome("fp32", 0, 1.0), outcome("fp32", 1, 1.0)])


def test_no_codec_within_the_limits() -> None:
    outcomes = [outcome("fp32", 0, 1.0, 8e9), outcome("uint8", 0, 1.0, 4e9)]
    with pytest.raises(ValueError, match=r"bound 0 needs 3\.73 GiB on the fullest rank"):
        choose_codec(outcomes, max_memory_bytes=1e9)
