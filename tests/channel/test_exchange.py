"""Exchanges among real processes, compared bit for bit with what was sent."""

import random
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.processes import run
from tests.tiers import network_is_slow, slow_but
from torchrec_bls import BoundedLagChannel

BOUNDS = (0, 1, 2, 4)
DTYPES = (torch.uint8, torch.bool, torch.float16, torch.int32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Part:
    """A tensor to send: the row count differs between pairs of ranks and may be 0."""

    dtype: torch.dtype
    rows: int
    columns: int
    gap: int  # between rows, in items

    def tensor(self, source: int, destination: int, sequence: int, index: int) -> torch.Tensor:
        rows = self.rows * ((source + 2 * destination + index) % 3)
        generator = torch.Generator().manual_seed(
            ((source * 16 + destination) * 1000 + sequence) * 16 + index
        )
        row_bytes = (self.columns + self.gap) * self.dtype.itemsize
        raw = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)
        return raw.view(self.dtype)[:, : self.columns]


def message(
    plan: Sequence[Part], source: int, destination: int, sequence: int
) -> list[torch.Tensor]:
    return [part.tensor(source, destination, sequence, i) for i, part in enumerate(plan)]


def as_bytes(tensor: torch.Tensor) -> bytes:
    # Seen as bytes first: copying the rows of a bool tensor turns every byte into 0 or 1.
    return tensor.view(torch.uint8).contiguous().numpy().tobytes()


def exchange(channel: BoundedLagChannel, plans: Sequence[Sequence[Part]], jitter: float) -> None:
    """Exchanges one message per plan with `bound` iterations in flight, and checks all."""
    delays = random.Random(channel.rank)
    for step in range(len(plans) + channel.bound):
        if step < len(plans):
            parts = [
                message(plans[step], channel.rank, peer, step) for peer in range(channel.world_size)
            ]
            assert channel.post(parts) == step
        if delays.random() < jitter:
            time.sleep(delays.random() * 0.002)
        if step >= channel.bound:
            check_next(channel, plans[step - channel.bound])


def check_next(channel: BoundedLagChannel, plan: Sequence[Part]) -> None:
    with channel.wait() as arrival:
        for source in range(channel.world_size):
            expected = message(plan, source, channel.rank, arrival.sequence)
            received = arrival.parts(source)
            assert [bytes(view) for view in received] == [as_bytes(t) for t in expected]
            for i, tensor in enumerate(expected):
                view = arrival.tensor(source, i, tensor.dtype)
                assert view.dtype == tensor.dtype
                assert view.numel() == tensor.numel()
                assert as_bytes(view) == as_bytes(tensor)


def exchange_once(rank: int, plans: Sequence[Sequence[Part]], bound: int, slot_bytes: int) -> None:
    warnings.simplefilter("ignore")  # of messages larger than a slot, which some are on purpose
    group = dist.group.WORLD
    with BoundedLagChannel(group, bound=bound, slot_bytes=slot_bytes, deadline=30) as channel:
        exchange(channel, plans, jitter=0)


def exchange_with_every_bound(rank: int, iterations: int) -> list[list[int]]:
    plans = [
        [Part(torch.float32, step % 5, 3, 0), Part(torch.int64, 2, 1 + step % 3, step % 2)]
        for step in range(iterations)
    ]
    histograms = []
    for bound in BOUNDS:
        with BoundedLagChannel(
            dist.group.WORLD, bound=bound, slot_bytes=1024, deadline=30
        ) as channel:
            exchange(channel, plans, jitter=0.3)
            histograms.append(channel.stats().lag_histogram)
    return histograms


parts = st.builds(
    Part,
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 20),
    columns=st.integers(1, 40),
    gap=st.integers(0, 2),
)


# An example takes a second: few of them, and none to find the smallest one that fails.
@network_is_slow
@pytest.mark.usefixtures("transport")
@settings(
    max_examples=20,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    plans=st.lists(st.lists(parts, max_size=16), min_size=1, max_size=8),
    world_size=st.sampled_from([1, 2, 3]),
    bound=st.sampled_from(BOUNDS),
    slot_bytes=st.sampled_from([256, 1 << 16]),
)
def test_tensors_of_any_shape_and_dtype_arrive_unchanged(
    plans: list[list[Part]], world_size: int, bound: int, slot_bytes: int
) -> None:
    run(world_size, exchange_once, plans, bound, slot_bytes)


class Tagged(torch.Tensor):
    """A class of somebody else's."""


def post_unusual_tensors(rank: int) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    bytes_of_each = {
        torch.nn.Parameter(values): values,
        (values.clone().requires_grad_() * 2): values * 2,
        values.as_subclass(Tagged): values,
        values.as_subclass(Tagged)[:, 1:3]: values[:, 1:3],
        torch.quantize_per_tensor(values, 1.0, 0, torch.quint8): values.to(torch.uint8),
        values[1, 2]: values[1, 2],
        values[:, 2:3]: values[:, 2:3],
        values[:, :0].t(): torch.empty(0),
        values.to(torch.float8_e4m3fn): values.to(torch.float8_e4m3fn).view(torch.uint8),
        values.to(torch.complex64).conj(): values.to(torch.complex64),
    }
    with BoundedLagChannel(dist.group.WORLD, bound=0, slot_bytes=2048) as channel:
        channel.post([list(bytes_of_each)] * 2)
        with channel.wait() as arrival:
            for source in range(2):
                for part, expected in enumerate(bytes_of_each.values()):
                    arrived = arrival.tensor(source, part, expected.dtype)
                    assert torch.equal(arrived, expected.contiguous().flatten()), part


def test_the_memory_of_unusual_tensors_arrives() -> None:
    run(2, post_unusual_tensors)


def clear_the_list(rank: int) -> None:
    with BoundedLagChannel(dist.group.WORLD, bound=1, slot_bytes=1024) as channel:
        own = [torch.full((1000,), 7.0)]
        channel.post([own])
        own.clear()
        others = [torch.zeros(1000) for _ in range(50)]  # would lie where it lay
        with channel.wait() as arrival:
            assert arrival.tensor(0, 0, torch.float32).tolist() == [7.0] * 1000
        assert len(others) == 50


def test_what_a_rank_sends_itself_outlives_its_list() -> None:
    run(1, clear_the_list)


@pytest.mark.parametrize(
    ("transport", "world_size"),
    slow_but([("shm", 1), ("shm", 3), ("tcp", 2)], product(("shm", "tcp"), (1, 2, 3, 4, 8))),
    indirect=["transport"],
)
@pytest.mark.usefixtures("transport")
def test_messages_arrive_unchanged_under_random_delays(world_size: int) -> None:
    iterations = 40
    for histograms in run(world_size, exchange_with_every_bound, iterations):
        for bound, histogram in zip(BOUNDS, histograms, strict=True):
            assert len(histogram) == bound + 1
            assert sum(histogram) == iterations * (world_size - 1)


def reach_the_bound(rank: int, bound: int) -> list[int]:
    store = dist.group.WORLD.get_group_store()
    with BoundedLagChannel(dist.group.WORLD, bound=bound, slot_bytes=256, deadline=50) as channel:

        def let_the_peer_begin() -> None:
            while channel.stats().lag_histogram[bound] == 0:
                time.sleep(0.01)
            store.set("begin", "")

        if rank == 0:
            threading.Thread(target=let_the_peer_begin, daemon=True).start()
        else:
            store.wait(["begin"])
        for _ in range(bound + 1):
            channel.post([[], []])
        for _ in range(bound + 1):
            channel.wait().release()
        return channel.stats().lag_histogram


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_a_rank_gets_ahead_by_the_whole_bound(bound: int, transport: str) -> None:
    ahead, behind = run(2, reach_the_bound, bound)
    assert ahead[bound] >= 1
    assert sum(behind) == bound + 1
    if transport == "shm":  # the other one does not know of what is on its way
        assert behind[0] == bound + 1


def post_again_in_the_same_memory(rank: int) -> None:
    with BoundedLagChannel(dist.group.WORLD, bound=1, slot_bytes=1024) as channel:
        tensor = torch.zeros(8)
        peer = 1 - rank
        for value in (1.0, 2.0):
            tensor.fill_(value)
            to_peer = [tensor]
            channel.post([to_peer if rank_ == peer else [] for rank_ in range(2)])
        for value in (1.0, 2.0):
            with channel.wait() as arrival:
                assert arrival.tensor(peer, 0, torch.float32).tolist() == [value] * 8
                assert arrival.parts(rank) == []


@pytest.mark.smoke
def test_memory_may_be_reused_after_the_post() -> None:
    run(2, post_again_in_the_same_memory)


def keep_an_arrival_for_long(rank: int) -> None:
    with BoundedLagChannel(dist.group.WORLD, bound=0, slot_bytes=1024) as channel:
        channel.post([[torch.tensor([0])]])
        old = channel.wait()
        old.release()
        for value in range(1, 9):  # its slots are used again and again
            channel.post([[torch.tensor([value])]])
            arrival = channel.wait()
            assert (old.sequence, arrival.sequence) == (0, value)
            with pytest.raises(ValueError, match="messages of sequence 0 were released"):
                old.tensor(0, 0, torch.int64)
            old.release()
            assert arrival.tensor(0, 0, torch.int64).item() == value
            arrival.release()


def test_an_arrival_stays_released() -> None:
    run(1, keep_an_arrival_for_long)


def two_channels_and_a_subgroup(rank: int) -> list[int]:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = halves[rank % 2]
    received = []
    with (
        BoundedLagChannel(dist.group.WORLD, slot_bytes=256, name="same name") as first,
        BoundedLagChannel(dist.group.WORLD, slot_bytes=256, name="same name") as second,
        BoundedLagChannel(half, slot_bytes=256, name="same name") as third,
    ):
        for number, channel in enumerate((first, second, third)):
            value = torch.tensor([rank * 10 + number])
            channel.post([[value]] * channel.world_size)
        for channel in (third, second, first):
            with channel.wait() as arrival:
                received += [
                    int(arrival.tensor(source, 0, torch.int64))
                    for source in range(channel.world_size)
                ]
    return received


def test_channels_of_one_name_and_of_subgroups_are_separate() -> None:
    for rank, received in enumerate(run(4, two_channels_and_a_subgroup)):
        assert received[:2] == [rank % 2 * 10 + 2, (rank % 2 + 2) * 10 + 2]
        assert received[2:] == [1, 11, 21, 31, 0, 10, 20, 30]
