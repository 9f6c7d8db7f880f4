"""All-to-alls over the backend `bls`: any dtype and shape, handles, and mistakes."""

import random
import re
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import BLSOptions

DTYPES = [
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
]
# Below the slots of the tests, about their size, and above.
SLOT_BYTES = 4096


def new_group(bound: int = 0) -> dist.ProcessGroup:
    return dist.new_group(
        backend="bls", pg_options=BLSOptions(bound=bound, slot_bytes=SLOT_BYTES, deadline=50)
    )


def rows(
    source: int, destination: int, call: int, count: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """What `source` sends to `destination` in its call number `call`: any bits."""
    seed = (source * 16 + destination) * 1000 + call
    generator = torch.Generator().manual_seed(seed)
    shape = (count, columns * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Call:
    """One all-to-all with sizes that differ by pair of ranks, the same on every rank."""

    def __init__(self, number: int, group: dist.ProcessGroup, largest: int) -> None:
        draw = random.Random(number)
        rank, ranks = group.rank(), range(group.size())
        self.group = group
        self.columns = draw.choice([1, 3, 16])
        self.dtype = draw.choice(DTYPES)
        self.as_list = draw.random() < 0.3
        most = max(1, largest // (self.columns * self.dtype.itemsize))
        counts = [[draw.choice([0, 1, draw.randint(0, most)]) for _ in ranks] for _ in ranks]
        self.sends = [self.rows(number, rank, d, counts[rank][d]) for d in ranks]
        self.expected = [self.rows(number, s, rank, counts[s][rank]) for s in ranks]

    def rows(self, number: int, source: int, destination: int, count: int) -> torch.Tensor:
        return rows(source, destination, number, count, self.columns, self.dtype)

    def start(self) -> Any:
        empty = [torch.empty_like(tensor) for tensor in self.expected]
        if self.as_list:
            self.outputs = empty
            return dist.all_to_all(self.outputs, self.sends, group=self.group, async_op=True)
        # Concatenated as bytes: torch cannot do that to every dtype.
        sent, received = (
            torch.cat([t.view(torch.uint8) for t in tensors]).view(self.dtype)
            for tensors in (self.sends, empty)
        )
        work = dist.all_to_all_single(
            received,
            sent,
            [len(t) for t in empty],
            [len(t) for t in self.sends],
            group=self.group,
            async_op=True,
        )
        self.outputs = list(received.split([len(t) for t in empty]))
        return work

    def check(self) -> None:
        assert [as_bytes(t) for t in self.outputs] == [as_bytes(t) for t in self.expected]


def exchange(rank: int, bound: int, calls: int) -> None:
    group = new_group(bound)
    delays = random.Random(rank)
    started: list[tuple[Call, Any]] = []
    for number in range(calls):
        call = Call(number, group, largest=3 * SLOT_BYTES if number % 3 == 0 else 200)
        started.append((call, call.start()))
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.002)
        if len(started) > bound or delays.random() < 0.2:
            done, work = started.pop(0)
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
            done.check()
    for call, work in started:
        work.wait()
        call.check()
    assert group.channel.stats().pulled_messages > 0


@pytest.mark.parametrize(
    ("world_size", "bound"),
    slow_but([(1, 0), (2, 0), (3, 2)], product((1, 2, 3, 4, 8), (0, 2))),
)
def test_any_dtype_and_split_arrives_bit_for_bit(world_size: int, bound: int) -> None:
    if world_size == 1:
        run(1, exchange_with_itself)
    else:
        run(world_size, exchange, bound, 60, deadline=120)


def exchange_with_itself(rank: int) -> None:
    group = new_group()
    received = torch.empty(3, 2)
    dist.all_to_all_single(received, torch.arange(6.0).view(3, 2), group=group)
    assert received.tolist() == [[0, 1], [2, 3], [4, 5]]


def every_dtype(rank: int) -> None:
    group = new_group()
    for number, dtype in enumerate(DTYPES):
        sent = torch.cat([rows(rank, d, number, 3, 2, dtype).view(torch.uint8) for d in range(2)])
        expected = torch.cat(
            [rows(s, rank, number, 3, 2, dtype).view(torch.uint8) for s in range(2)]
        )
        received = torch.zeros_like(sent).view(dtype)
        dist.all_to_all_single(received, sent.view(dtype), group=group)
        assert as_bytes(received) == as_bytes(expected), dtype


def test_every_dtype_of_torch() -> None:
    assert len(DTYPES) > 20
    run(2, every_dtype)


def awkward_shapes(rank: int) -> None:
    group, peer = new_group(), 1 - rank
    for shape in [(0,), (0, 5), (4, 0), (4, 3, 2)]:
        sent = torch.full(shape, float(rank))
        received = torch.full(shape, -1.0)
        dist.all_to_all_single(received, sent, group=group)
        half = shape[0] // 2
        assert torch.equal(received[:half], torch.zeros(half, *shape[1:]))
        assert torch.equal(received[half:], torch.ones(half, *shape[1:]))
    # Only one of the two has anything to send, and one of the two sides of a call has other rows.
    sent = torch.arange(6.0) if rank == 0 else torch.empty(0)
    received = torch.empty(0) if rank == 0 else torch.empty(3, 2)
    splits = ([0, 6] if rank == 0 else [0, 0]), ([0, 0] if rank == 0 else [3, 0])
    dist.all_to_all_single(received, sent, splits[1], splits[0], group=group)
    assert rank == 0 or received.tolist() == [[0, 1], [2, 3], [4, 5]]
    # Inputs are copied where they are not contiguous.
    matrix = torch.arange(8.0).view(2, 4) + 100 * rank
    received = torch.empty(4, 2)
    dist.all_to_all_single(received, matrix.t(), group=group)
    mine = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(received[:2], torch.arange(8.0).view(2, 4).t()[mine])
    assert torch.equal(received[2:], (torch.arange(8.0).view(2, 4) + 100).t()[mine])
    outputs = [torch.empty(2), torch.empty(2)]
    dist.all_to_all(outputs, [matrix[:, d] for d in range(2)], group=group)
    assert torch.equal(outputs[peer], matrix[:, rank] + 100 * (peer - rank))
    conjugated = torch.tensor([1 + 2j, 3 + 4j]).conj()
    received = torch.empty(2)
    dist.all_to_all_single(received, conjugated.imag, group=group)
    assert received.tolist() == [[-2, -2], [-4, -4]][rank]


def test_shapes_without_elements_and_inputs_that_are_not_contiguous() -> None:
    run(2, awkward_shapes)


def use_handles(rank: int) -> None:
    group = new_group(bound=1)
    store = dist.group.WORLD.get_group_store()

    def start(value: float) -> tuple[torch.Tensor, Any]:
        received = torch.zeros(2)
        sent = torch.full((2,), value)
        return received, dist.all_to_all_single(received, sent, group=group, async_op=True)

    start(0.0)[1].wait()  # the first call sets up the channel, together with the peer
    if rank == 1:
        store.wait(["rank 0 has looked"])
    first, second = start(1.0 + rank), start(3.0 + rank)
    if rank == 0:
        assert not first[1].is_completed()
        assert not first[1].is_success()
        assert first[1].exception() is None
        store.set("rank 0 has looked", "")
    while not second[1].is_completed():
        time.sleep(0.001)
    # Completed in order, and by looking alone.
    assert first[1].finished
    assert first[0].tolist() == [1, 2]
    assert second[0].tolist() == [3, 4]
    assert second[1].result()[0] is second[0]
    assert second[1].get_future().value()[0] is second[0]

    # A third call completes the oldest.
    begun = [start(float(call)) for call in range(4)]
    assert [work.finished for _, work in begun] == [True, True, False, False]
    begun[3][1].wait()
    assert [received.tolist() for received, _ in begun] == [[call] * 2 for call in range(4)]

    # A future is completed by nobody's wait.
    _, work = start(7.0)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.get_future() is work.get_future()
    assert doubled.wait().tolist() == [14, 14]
    torch.futures.wait_all([start(8.0)[1].get_future()])

    # A dropped handle is completed all the same, and the peer is not held up by it.
    dropped = torch.zeros(2)
    dist.all_to_all_single(dropped, torch.full((2,), 9.0), group=group, async_op=True)
    start(0.0)[1].wait()
    assert dropped.tolist() == [9, 9]


@pytest.mark.smoke
def test_handles() -> None:
    run(2, use_handles)


def make_mistakes(rank: int) -> list[str]:
    group = new_group()
    texts = []

    def refused(error: type[Exception], call: Callable[..., Any], *args: Any) -> None:
        with pytest.raises(error) as caught:
            call(*args, group=group)
        texts.append(str(caught.value))

    single, several = dist.all_to_all_single, dist.all_to_all
    refused(ValueError, single, torch.empty(4, 4)[:, ::2], torch.empty(4, 2))
    refused(ValueError, single, torch.empty(3), torch.empty(4))
    refused(ValueError, single, torch.empty(4), torch.empty(3))
    refused(ValueError, single, torch.empty(4), torch.empty(4), [1, 2, 1])
    refused(ValueError, single, torch.empty(4), torch.empty(4), [2, 2], [2, 3])
    refused(ValueError, single, torch.empty(4), torch.empty(4), [5, -1], [2, 2])
    refused(ValueError, single, torch.empty(4, device="meta"), torch.empty(4))
    refused(ValueError, single, torch.empty(()), torch.empty(()))
    refused(ValueError, several, [torch.empty(1)], [torch.empty(1)] * 2)
    refused(ValueError, several, [torch.empty(1)] * 2, [torch.empty(1)] * 3)
    refused(ValueError, several, [torch.empty(4)[::2]] * 2, [torch.empty(2)] * 2)
    # None of it was sent.
    received = torch.empty(2)
    single(received, torch.full((2,), float(rank)), group=group)
    assert received.tolist() == [0, 1]
    return texts


def test_mistakes_are_refused_and_send_nothing() -> None:
    expected = [
        "output of shape (4, 2) has strides (4, 2), but must be contiguous",
        "output has 3 rows, which do not divide equally among 2 ranks: give output_split_sizes",
        "input has 3 rows, which do not divide equally among 2 ranks: give input_split_sizes",
        "output_split_sizes are [1, 2, 1], but have to be 2 numbers of rows, one a rank, that sum "
        "to output's 4",
        "input_split_sizes are [2, 3], but have to be 2 numbers",
        "output_split_sizes are [5, -1], but have to be 2 numbers",
        "output is on meta, but backend 'bls' is for CPU tensors",
        "input is a scalar",
        "output_tensor_list has 1 tensors, but needs one for each of 2 ranks",
        "input_tensor_list has 3 tensors, but needs one for each of 2 ranks",
        "output of shape (2,) has strides (2,), but must be contiguous",
    ]
    for texts in run(2, make_mistakes):
        assert_begin_with(texts, expected)


def assert_begin_with(texts: Sequence[str], expected: Sequence[str]) -> None:
    assert len(texts) == len(expected)
    for text, begin in zip(texts, expected, strict=True):
        assert re.match(re.escape(begin), text), text


def expect_other_sizes(rank: int) -> None:
    received = torch.zeros(2 if rank == 0 else 3)
    splits = [1, 1] if rank == 0 else [1, 2]
    group = new_group()
    dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group)
    try:
        dist.all_to_all_single(received, torch.ones(2), splits, group=group)
        dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group)
    finally:
        assert rank == 0 or received.tolist() == [0, 0, 0]


def test_sizes_that_differ_between_sender_and_receiver_fail_on_all_ranks() -> None:
    sender, receiver = run_outcomes(2, expect_other_sizes)
    assert receiver.error == "ProtocolError", receiver
    text = "rank 1 sent 4 bytes, but this rank's output has room for 8 from it"
    assert f"sequence 1, lag 0: {text}" in receiver.message
    assert sender.error == "PoisonedError", sender
    assert "rank 1 failed: " in sender.message and text in sender.message
