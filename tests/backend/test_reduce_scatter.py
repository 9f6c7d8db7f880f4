"""Sums of float32 by `reduce_scatter_tensor` over the backend `bls` are gloo's, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import BLSOptions

# Smaller than gloo's segments, multiples of nothing, and of several segments for each rank.
SIZES = [0, 1, 2, 5, 17, 1000, 4097, 200_003, 700_001]


def new_group() -> Any:
    return dist.new_group(backend="bls", pg_options=BLSOptions(slot_bytes=4096, deadline=50))


def compare_sums(rank: int) -> int:
    gloo, bls = dist.new_group(backend="gloo"), new_group()
    world_size = dist.get_world_size()
    for size in SIZES:
        generator = torch.Generator().manual_seed(100 * size + rank)
        # Of many magnitudes, so that each order of the additions gives other bits.
        exponents = torch.randint(-12, 12, (world_size * size,), generator=generator)
        numbers = torch.randn(world_size * size, generator=generator) * 2.0**exponents
        expected, found = torch.empty(size), torch.empty(size)
        dist.reduce_scatter_tensor(expected, numbers, group=gloo)
        dist.reduce_scatter_tensor(found, numbers, group=bls)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), size
    messages: int = bls.channel.stats().messages
    return messages


@pytest.mark.parametrize("world_size", slow_but([2, 3], [1, 2, 3, 4, 8]))
def test_sums_are_those_of_gloo_and_go_through_the_channel(world_size: int) -> None:
    for messages in run(world_size, compare_sums, deadline=120):
        assert messages == len(SIZES) * (world_size - 1)


def take_turns(rank: int) -> None:
    """Sums and all-to-alls in flight at once are completed in the order in which they were made."""
    group = dist.new_group(backend="bls", pg_options=BLSOptions(bound=3, deadline=50))
    works, outputs = [], []
    for call in range(4):
        sent = torch.tensor([10.0 * call + rank, 10.0 * call + rank])
        if call % 2:
            outputs.append(torch.empty(2))
            works.append(dist.all_to_all_single(outputs[-1], sent, group=group, async_op=True))
        else:
            outputs.append(torch.empty(1))
            works.append(dist.reduce_scatter_tensor(outputs[-1], sent, group=group, async_op=True))
    for work in reversed(works):
        work.wait()
    assert [output.tolist() for output in outputs] == [[1.0], [10.0, 11.0], [41.0], [30.0, 31.0]]


def test_sums_take_turns_with_all_to_alls() -> None:
    run(2, take_turns)


def leave_to_gloo(rank: int) -> None:
    group = new_group()
    largest, doubles = torch.empty(2), torch.empty(2, dtype=torch.float64)
    numbers = torch.arange(4.0) * (1 - 2 * rank)
    dist.reduce_scatter_tensor(largest, numbers, op=dist.ReduceOp.MAX, group=group)
    assert largest.tolist() == [[0.0, 1.0], [2.0, 3.0]][rank]
    dist.reduce_scatter_tensor(doubles, numbers.double(), group=group)
    assert doubles.tolist() == [0.0, 0.0]
    assert group.channel is None


def test_other_reductions_and_types_are_left_to_gloo() -> None:
    run(2, leave_to_gloo)


def make_mistakes(rank: int) -> None:
    group = new_group()
    for output, text in [
        (torch.empty(3), "reduce_scatter of 4 x torch.float32 among 2 ranks into an output of 3"),
        (torch.empty(2, dtype=torch.float64), "into an output of 2 x torch.float64"),
        (torch.empty(2, 2)[:, 0], "must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=text):
            dist.reduce_scatter_tensor(output, torch.empty(4), group=group)


def test_mistakes_are_refused() -> None:
    run(2, make_mistakes)


def send_different_sizes(rank: int) -> None:
    size = 2 + rank
    dist.reduce_scatter_tensor(torch.empty(size), torch.empty(2 * size), group=new_group())


def test_sizes_that_differ_between_ranks_fail_on_all_of_them() -> None:
    outcomes = run_outcomes(2, send_different_sizes)
    assert {outcome.error for outcome in outcomes} <= {"ProtocolError", "PoisonedError"}
    assert any("compare the split sizes, shapes and dtypes" in o.message for o in outcomes)
