"""The all-to-all cases of torch's own distributed tests, restated for the backend `bls`.

Theirs are the `test_all_to_all*` of torch/testing/_internal/distributed/distributed_test.py: over
the default group, a group of all ranks and a smaller one; equal and unequal splits; floats and
complex numbers; and the autograd of torch.distributed.nn.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_autograd
from torch.distributed import _functional_collectives as functional

import torchrec_bls  # noqa: F401 - registers the backend
from tests.processes import run
from tests.tiers import slow_but

DTYPES = (torch.float32, torch.complex64)


def groups() -> list[tuple[list[int], dist.ProcessGroup]]:
    """The default group, one of the same ranks, and, from three ranks on, one of ranks 1 and 2."""
    everyone = list(range(dist.get_world_size()))
    found = [(everyone, dist.group.WORLD), (everyone, dist.new_group(everyone))]
    if len(everyone) > 2:
        found.append(([1, 2], dist.new_group([1, 2])))
    return [(ranks, group) for ranks, group in found if dist.get_rank() in ranks]


def equal_splits(rank: int, ranks: list[int], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    size = len(ranks)
    sent = torch.ones([size, size], dtype=dtype) * rank
    received = torch.ones([size, size], dtype=dtype) * -1
    dist.all_to_all_single(received, sent, group=group)
    torch.testing.assert_close(
        received, torch.cat([torch.ones([1, size], dtype=dtype) * i for i in ranks]), rtol=0, atol=0
    )


def unequal_splits(
    rank: int, ranks: list[int], group: dist.ProcessGroup, dtype: torch.dtype
) -> None:
    size, own = len(ranks), ranks.index(rank)
    input_splits = [i + 1 for i in range(size)]
    output_splits = [own + 1] * size
    sent = torch.ones([sum(input_splits), size], dtype=dtype) * rank
    received = torch.ones([(own + 1) * size, size], dtype=dtype)
    expected = torch.cat([torch.ones([own + 1, size], dtype=dtype) * i for i in ranks])
    dist.all_to_all_single(received, sent, output_splits, input_splits, group=group)
    torch.testing.assert_close(received, expected, rtol=0, atol=0)


def list_of_tensors(
    rank: int, ranks: list[int], group: dist.ProcessGroup, dtype: torch.dtype
) -> None:
    size, own = len(ranks), ranks.index(rank)
    sent = [torch.ones([i + 1, size], dtype=dtype) * rank for i in range(size)]
    received = [torch.ones([own + 1, size], dtype=dtype) for _ in ranks]
    dist.all_to_all(received, sent, group=group)
    for source, tensor in zip(ranks, received, strict=True):
        expected = torch.ones([own + 1, size], dtype=dtype) * source
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def gradients(rank: int, ranks: list[int], group: dist.ProcessGroup) -> None:
    """What goes to rank d is weighted by d + 1 there; so is its gradient here."""
    size, own = len(ranks), ranks.index(rank)
    splits = [i + 1 for i in range(size)]
    sent = torch.randn(sum(splits), 3, requires_grad=True)
    weights = torch.cat([torch.full((i + 1, 3), i + 1.0) for i in range(size)])
    received = with_autograd.all_to_all_single(
        torch.empty((own + 1) * size, 3), sent, [own + 1] * size, splits, group=group
    )
    (received * (own + 1)).sum().backward()
    torch.testing.assert_close(sent.grad, weights, rtol=0, atol=0)

    tensors = [torch.randn(4, requires_grad=True) for _ in ranks]
    outputs = with_autograd.all_to_all([torch.empty(4) for _ in ranks], tensors, group=group)
    (torch.stack(list(outputs)) * (own + 1)).sum().backward()
    for destination, tensor in enumerate(tensors):
        torch.testing.assert_close(tensor.grad, torch.full((4,), destination + 1.0))

    functional_input = torch.randn(sum(splits), 2, requires_grad=True)
    result = functional.all_to_all_single_autograd(
        functional_input, [own + 1] * size, splits, group
    )
    (result * (own + 1)).sum().backward()
    torch.testing.assert_close(functional_input.grad, weights[:, :2], rtol=0, atol=0)


def all_cases(rank: int) -> None:
    for ranks, group in groups():
        assert dist.get_backend(group) == "cpu:bls"
        for dtype in DTYPES:
            equal_splits(rank, ranks, group, dtype)
            unequal_splits(rank, ranks, group, dtype)
            list_of_tensors(rank, ranks, group, dtype)
        gradients(rank, ranks, group)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", slow_but([2, 3], [2, 3, 4, 8]))
def test_the_cases_of_torch(world_size: int) -> None:
    run(world_size, all_cases, backend="cpu:bls", deadline=120)
