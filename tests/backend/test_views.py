"""Calls of the backend `bls` with tensors whose memory is not what they hold, or is shared.

torch has no public name for a tensor with the negative bit over contiguous memory.
`torch._neg_view` makes one, and so does `.imag` of a conjugated tensor with one element.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import run
from torchrec_bls import BLSOptions
from torchrec_bls.codecs import rows as codec_rows
from torchrec_bls.collective.backend.buffers import check_reduced


def new_group() -> Any:
    return dist.new_group(backend="bls", pg_options=BLSOptions(deadline=50))


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as `-tensor`, with the negative bit."""
    view: torch.Tensor = torch._neg_view(tensor)  # type: ignore[attr-defined]
    assert view.is_neg() and view.is_contiguous()
    return view


def numbers(rank: int, count: int = 4) -> torch.Tensor:
    return torch.arange(float(count)) + 10 * rank


def reduce_negated(rank: int) -> None:
    group = new_group()
    ops = dist.ReduceOp
    for operation, expected in [
        (ops.MAX, -numbers(0)),
        (ops.MIN, -numbers(1)),
        (ops.SUM, -numbers(0) - numbers(1)),
        (ops.AVG, -(numbers(0) + numbers(1)) / 2),
    ]:
        for is_async in (False, True):
            tensor = negated(numbers(rank))
            work = dist.all_reduce(tensor, operation, group=group, async_op=is_async)
            if work is not None:
                work.wait()
            assert torch.equal(tensor, expected), operation
    one = torch.complex(torch.zeros(1), torch.ones(1) * (rank + 1)).conj().imag
    assert one.is_neg()
    dist.all_reduce(one, ops.MAX, group=group)
    assert one.tolist() == [-1.0]


def test_all_reduces_of_negated_views() -> None:
    run(2, reduce_negated)


def send_views(rank: int) -> None:
    group = new_group()
    received = torch.empty(4)
    dist.all_to_all_single(received, negated(numbers(rank)), group=group)
    sent_here = torch.cat([numbers(0)[2 * rank :][:2], numbers(1)[2 * rank :][:2]])
    assert torch.equal(received, -sent_here)

    parts = [torch.empty(2), torch.empty(2)]
    dist.all_to_all(parts, [negated(each) for each in numbers(rank).split(2)], group=group)
    assert torch.equal(torch.cat(parts), -sent_here)

    sums = torch.empty(2)
    dist.reduce_scatter_tensor(sums, negated(numbers(rank)), group=group)
    assert torch.equal(sums, -(numbers(0) + numbers(1))[2 * rank :][:2])


def test_negated_inputs_arrive_as_they_read() -> None:
    run(2, send_views)


def use_one_memory(rank: int) -> None:
    group = new_group()
    sums = (numbers(0) + numbers(1))[2 * rank :][:2]
    for at in range(3):  # the own part, another's, and some of both
        memory = numbers(rank)
        dist.reduce_scatter_tensor(memory[at : at + 2], memory, group=group)
        assert torch.equal(memory[at : at + 2], sums), at

    expected = torch.cat([numbers(0, 6)[2 * rank :][:2], numbers(1, 6)[2 * rank :][:2]])
    for at in range(3):
        memory = numbers(rank, 6)
        dist.all_to_all_single(memory[at : at + 4], memory[:4].clone(), group=group)
        assert torch.equal(memory[at : at + 4], expected)
        memory = numbers(rank, 6)
        dist.all_to_all_single(memory[at : at + 4], memory[:4], group=group)
        assert torch.equal(memory[at : at + 4], expected), at
        memory = numbers(rank, 6)
        outputs = list(memory[at : at + 4].split(2))
        dist.all_to_all(outputs, list(memory[:4].split(2)), group=group)
        assert torch.equal(torch.cat(outputs), expected), at


def test_outputs_may_share_memory_with_inputs() -> None:
    run(2, use_one_memory)


def refuse(rank: int) -> None:
    group = new_group()
    one = torch.ones(1)
    shared = torch.empty(3)
    single, several = dist.all_to_all_single, dist.all_to_all
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("elements share memory", dist.all_reduce, (one.expand(3),)),
        ("elements share memory", dist.all_reduce, (torch.ones(4).as_strided((3, 2), (1, 1)),)),
        ("elements share memory", dist.all_reduce, (one.expand(3), dist.ReduceOp.MAX)),
        ("must be contiguous", single, (one.expand(4), torch.ones(4))),
        ("view that negates", single, (negated(torch.empty(4)), torch.ones(4))),
        ("outputs share memory", several, ([shared[:2], shared[1:]], [torch.ones(2)] * 2)),
        ("outputs share memory", several, ([shared] * 2, [torch.ones(3)] * 2)),
        ("layout torch.sparse_coo", single, (torch.empty(4), torch.ones(4).to_sparse())),
        ("layout torch.sparse_coo", single, (torch.empty(4).to_sparse(), torch.ones(4))),
        ("is on meta", single, (torch.empty(4), torch.ones(4, device="meta"))),
        ("view that negates", dist.reduce_scatter_tensor, (negated(torch.ones(2)), torch.ones(4))),
        ("must be contiguous", dist.reduce_scatter_tensor, (one.expand(2), torch.ones(4))),
    ]
    # Only one rank makes the mistakes: the other one has nothing to wait for.
    for turn in range(2):
        for text, call, arguments in calls if turn == rank else []:
            with pytest.raises(ValueError, match=text):
                call(*arguments, group=group)
        tensor, received, sums = torch.ones(3), torch.empty(2), torch.empty(1)
        dist.all_reduce(tensor, group=group)
        dist.all_to_all_single(received, torch.full((2,), float(rank)), group=group)
        dist.reduce_scatter_tensor(sums, torch.ones(2), group=group)
        assert tensor.tolist() == [2, 2, 2] and received.tolist() == [0, 1] and sums.item() == 2


def test_a_refused_call_fails_its_rank_alone_and_the_group_goes_on() -> None:
    run(2, refuse)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=0, max_size=3),
)
def test_tensors_that_share_memory_are_found(dimensions: list[tuple[int, int]]) -> None:
    sizes, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    tensor = torch.arange(64).as_strided(sizes, strides)
    share = tensor.unique().numel() < tensor.numel()
    if share:
        with pytest.raises(ValueError, match="share memory"):
            check_reduced(tensor)
    elif tensor.is_contiguous():
        check_reduced(tensor)


def test_views_without_shared_memory_are_reduced() -> None:
    whole = torch.empty(4, 6, 2)
    for view in (whole, whole[::2], whole[:, 1:3], whole.mT, whole[:, :, 1]):
        check_reduced(view)
    check_reduced(torch.empty(1).expand(1, 1))
    check_reduced(torch.empty(0, 3).expand(0, 3))


def test_codecs_refuse_negated_rows() -> None:
    with pytest.raises(ValueError, match="resolve_neg"):
        codec_rows.encode(negated(torch.ones(2, 4)), codec_rows.Codec.UINT8)
