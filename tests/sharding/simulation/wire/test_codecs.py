"""Exchanges with codecs: bytes, work and memory counted by hand, and what must hold of any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec_bls.sharding.cost_interface import Estimate
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.problem.plan_groups import memory_of
from torchrec_bls.sharding.problem.tables import PlacedShard, PlacedTable, Table, Workload
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.simulation.bounds import Simulation, simulate_bounds
from torchrec_bls.sharding.simulation.delays import read_delays
from torchrec_bls.sharding.simulation.engine.timeline import simulate
from torchrec_bls.sharding.simulation.plan_steps import program_of
from torchrec_bls.sharding.simulation.program import Ranks, graph_of
from torchrec_bls.sharding.simulation.wire.codecs import FP32, CodecCosts
from torchrec_bls.sharding.simulation.wire.link import Link

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy
from torchrec_bls.rank_steps import Begin, Messages, Op, PlannedCollective

COSTS = AdditiveTestCosts()
UINT8 = CodecCosts("uint8", 1.0, 8.0, encode_us_per_value=0.001, decode_us_per_value=0.002)
# Two ranks with a table each, 64 samples on each rank: rank 0 sends 64 rows of 64 columns to each
# rank, itself included, and rank 1 as many of 32.
WIDE, NARROW = Table("wide", 1000, 64), Table("narrow", 1000, 32)
PLAN = [
    PlacedTable(WIDE, "table_wise", (PlacedShard(0, 1000, 64),)),
    PlacedTable(NARROW, "table_wise", (PlacedShard(1, 1000, 32),)),
]
WORKLOAD = Workload([WIDE, NARROW], {})
CODES = np.array([64 * 72.0, 64 * 40.0])


def begin_of(name: str, ops: list[Op]) -> Begin:
    """Returns the op that begins an exchange."""
    (found,) = (op for op in ops if isinstance(op, Begin) and op.exchange.name == name)
    return found


def program(job: Job, codec: CodecCosts, link: Link | None = None) -> list[Op]:
    return program_of(PLAN, WORKLOAD, job, COSTS, codec=codec, link=link)


def all_to_all_us(bytes_to_each: np.ndarray) -> np.ndarray:
    """As the additive costs have it, of so many bytes to each of two ranks."""
    return 30 + 2 * bytes_to_each / 1000


def test_encoding_and_decoding_are_work_at_both_ends() -> None:
    begin = begin_of("embeddings 0", program(roomy(2, training=False), UINT8))
    # Rank 0 encodes 2 x 64 x 64 values, rank 1 half of that; both decode 64 x 64 and 64 x 32.
    encode, decode = np.array([8.192, 4.096]), 6144 * 0.002
    # The lookup has written rows to where they are encoded from.
    np.testing.assert_allclose(begin.work_us, encode + all_to_all_us(np.zeros(2)) / 2)
    np.testing.assert_allclose(begin.finish_us, decode + all_to_all_us(CODES) / 2)


def test_in_training_only_codes_are_copied_into_slots() -> None:
    begin = begin_of("embeddings 0", program(roomy(2), UINT8))
    np.testing.assert_allclose(begin.work_us, [8.192, 4.096] + all_to_all_us(CODES) / 2)


def test_over_gloo_the_communication_thread_encodes_nothing() -> None:
    begin = begin_of("embeddings 0", program(roomy(2, training=False, backend="gloo"), UINT8))
    assert isinstance(begin.by, PlannedCollective)
    np.testing.assert_allclose(begin.work_us, [8.192, 4.096])
    np.testing.assert_allclose(begin.by.worker_us, all_to_all_us(CODES))
    np.testing.assert_allclose(begin.finish_us, 6144 * 0.002)


def test_sums_of_row_wise_tables_over_gloo_stay_float32() -> None:
    halves = tuple(PlacedShard(rank, 500, 64, 500 * rank) for rank in range(2))
    plan = [PlacedTable(WIDE, "row_wise", halves)]
    workers = {}
    for pooled in (True, False):
        table = replace(WIDE, pooled=pooled)
        placed = [replace(plan[0], table=table)]
        job = roomy(2, training=False, backend="gloo")
        ops = program_of(placed, Workload([table], {}), job, COSTS, codec=UINT8)
        by = begin_of("embeddings 0", ops).by
        assert isinstance(by, PlannedCollective)
        workers[pooled] = np.asarray(by.worker_us)[0]
    # An all-reduce of a copy.
    assert workers[True] == pytest.approx(50 + 2 * 2 * 64 * 64 * 4 / 1000)
    # Each id has a row, and half of them are on each rank.
    assert workers[False] == pytest.approx(30 + 2 * 32 * 72 / 1000)


def test_gradients_and_ids_travel_as_they_do() -> None:
    job = roomy(2)
    plain, encoded = program(job, FP32), program(job, UINT8)
    for name in ("ids 0", "gradients 0"):
        before, after = begin_of(name, plain), begin_of(name, encoded)
        np.testing.assert_array_equal(before.work_us, after.work_us)
        np.testing.assert_array_equal(before.finish_us, after.finish_us)


def test_bytes_pass_the_link_by_codec_and_direction() -> None:
    link = Link.of_hosts(2.0, ranks=2, per_host=1)
    ops = program(roomy(2), UINT8, link)
    transfers = {}
    for name in ("ids 0", "embeddings 0", "gradients 0"):
        by = begin_of(name, ops).by
        assert isinstance(by, Messages)
        transfers[name] = np.asarray(by.transfer_us).tolist()
    # What a rank sends and receives passes at once: the longer of both directions. Each 1,448 bytes
    # have 66 of headers.
    passing = (1 + 66 / 1448) / 2
    assert transfers["embeddings 0"] == pytest.approx([CODES.max() * passing] * 2)
    assert transfers["gradients 0"] == pytest.approx([16384 * passing] * 2)
    # 64 ids of 8 bytes and as many lengths of 4.
    assert transfers["ids 0"] == pytest.approx([768 * passing] * 2)


class CostsOverTcp(AdditiveTestCosts):
    """Channels over TCP take as long as nothing else."""

    def all_to_all(
        self, sent: Sequence[float], received: Sequence[float], backend: str, *others: Any
    ) -> Estimate:
        if backend == "tcp":
            return Estimate(1000.0, 1000.0, 1000.0)
        return super().all_to_all(sent, received, backend, *others)


def test_channels_go_over_tcp_where_there_is_a_link() -> None:
    over_tcp = CostsOverTcp()
    link = Link.of_hosts(2.0, ranks=2, per_host=1)
    begin = begin_of("gradients 0", program_of(PLAN, WORKLOAD, roomy(2), over_tcp, link=link))
    for half in (begin.work_us, begin.finish_us):
        assert np.asarray(half).tolist() == [500.0, 500.0]
    for job, passed in ((roomy(2), None), (roomy(2, backend="gloo"), link)):
        begin = begin_of("gradients 0", program_of(PLAN, WORKLOAD, job, over_tcp, link=passed))
        by = begin.by
        work = by.worker_us if isinstance(by, PlannedCollective) else begin.work_us
        assert (np.asarray(work) < 100).all()


def test_bytes_and_memory_of_a_simulation() -> None:
    job = roomy(2, training=False)
    simulation = Simulation(Ranks.on_hosts(2, 2, 2), read_delays("none"), 30, codecs=[UINT8])
    (found,) = simulate_bounds(PLAN, WORKLOAD, job, COSTS, [0], simulation)
    assert (found.codec, found.embedding_bytes) == ("uint8", float(CODES.sum()))
    # Two slots for each of two ranks: half as much again as the largest message, 256 bytes and what
    # a ring has, but never less than 16 KiB. Those of codes are that small.
    slots = 2 * 2
    saved = slots * (16384 * 3 // 2 + 256 - 16384)
    assert found.memory_bytes == max(memory_of(PLAN, WORKLOAD, job)) - saved


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 2**16),
    st.integers(0, 3),
    st.floats(0.01, 4.0),
    st.floats(0.01, 1000.0),
    st.sampled_from(["none", "uniform:0-5ms", "spikes:10%,20ms"]),
)
def test_fewer_bytes_for_nothing_are_never_slower(
    seed: int, bound: int, bytes_per_value: float, bytes_per_us: float, delays: str
) -> None:
    """On hosts of one rank each, where nobody competes for cores or links."""
    job = roomy(3, training=False, bound=bound)
    workload = random_workload(seed, 4, modules=2)
    plan = search(make_problem(workload, job, COSTS)).plan
    ranks = Ranks.on_hosts(3, 1, 1, link_bytes_per_us=bytes_per_us)
    drawn = read_delays(delays).sample(3, 12, seed)
    ends = []
    for codec in (FP32, CodecCosts("free", bytes_per_value)):
        stages = program_of(plan, workload, job, COSTS, codec=codec, link=ranks.link)
        ends.append(simulate(graph_of(stages, ranks, 12, drawn)).end)
    assert (ends[1] <= ends[0] * (1 + 1e-9)).all()


@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("bytes_per_value", [4.0, 1.0])
def test_on_a_slow_link_a_step_is_its_bytes(per_host: int, bytes_per_value: float) -> None:
    ranks, rate = 4, 1e-3
    job = roomy(ranks, training=False, ranks_per_host=per_host)
    workload = random_workload(3, 6, types=("table_wise",))
    plan = search(make_problem(workload, job, COSTS)).plan
    codec = CodecCosts("free", bytes_per_value)
    linked = Ranks.on_hosts(ranks, per_host, 8, link_bytes_per_us=rate)
    simulation = Simulation(linked, read_delays("none"), 40, codecs=[codec])
    (found,) = simulate_bounds(plan, workload, job, COSTS, [2], simulation)
    # Bytes that each host sends (0) and receives (1), of ids to a table's rank and rows from it.
    hosts = ranks // per_host
    ids, rows = np.zeros((2, hosts)), np.zeros((2, hosts))
    for placed in plan:
        owner = placed.shards[0].rank
        pooling = workload.reuse_of(placed.table).pooling_factor
        for other in range(ranks):
            here, there = owner // per_host, other // per_host
            if other != owner and (here != there or hosts == 1):
                for direction, (of_ids, of_rows) in enumerate([(there, here), (here, there)]):
                    ids[direction, of_ids] += 64 * (pooling * 8 + 4)
                    rows[direction, of_rows] += 64 * placed.table.dim * bytes_per_value
    headers = 1 + 66 / 1448
    slowest = (ids.max(axis=0) + rows.max(axis=0)).max() * headers / rate
    assert found.step_us == pytest.approx(slowest, rel=0.01)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((-1.0,), "bytes_per_value is -1.0"),
        ((1.0, float("nan")), "row_overhead_bytes is nan"),
        ((1.0, 0.0, float("inf")), "encode_us_per_value is inf"),
        ((1.0, 0.0, 0.0, -0.1), "decode_us_per_value is -0.1"),
    ],
)
def test_impossible_codecs(numbers: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=f"codec 'mine': {said}, but must not be negative"):
        CodecCosts("mine", *numbers)
