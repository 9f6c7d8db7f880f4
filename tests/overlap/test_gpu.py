"""Plans and their hook on a GPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.overlap.plans import FLOAT32, plan_of, profile_with, trying_all_plans
from tests.processes import run
from torchrec_bls import overlap
from torchrec_bls.overlap import hook
from torchrec_bls.overlap.bucket_plan import OverlapPlan
from torchrec_bls.overlap.search.timeline import Group

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.usefixtures("spawned"),
]

# A weight has 1 MiB, and a bucket of `_MIB` ends with each; a bias comes before its weight.
WIDTH, LAYERS, _MIB = 512, 6, 1
_BUSY = 20_000_000  # cycles: 10 ms


@pytest.fixture
def spawned() -> Iterator[None]:
    """CUDA does not work in a process that is forked of one which has begun with it."""
    with patch("tests.processes._START_METHOD", "spawn"):
        yield


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers).cuda()


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.rand(256, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()


def wrapped(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=_MIB)


def one_by_one(model: nn.Module, backend: str, ranks: int) -> OverlapPlan:
    return plan_of((Group(1),) * LAYERS, model=model, backend=backend, ranks=ranks)


def train(ddp: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        ddp(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in ddp.parameters()]


def follow(rank: int, backend: str) -> None:
    group = dist.new_group(backend=backend)
    ddp = wrapped(make_model(), group)
    one_by_one(ddp.module, backend, dist.get_world_size())._register(ddp, True)
    reduced: list[str] = []

    def noting(label: str) -> AbstractContextManager[None]:
        reduced.append(label)
        return nullcontext()

    with patch.object(hook, "record_function", noting):
        planned = train(ddp, rank)
    assert reduced[-LAYERS:] == [f"torchrec_bls bucket {each}, float32" for each in range(LAYERS)]
    default = train(wrapped(make_model(), dist.new_group(backend=backend)), rank)
    for mine, theirs in zip(planned, default, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
def test_ddp_follows_and_trains_as_by_default(backend: str, ranks: int) -> None:
    # NCCL takes one rank a GPU; gloo's ranks may share one.
    run(ranks, follow, backend)


class _Late(torch.autograd.Function):
    """Keeps the stream busy before each gradient, so that whoever does not wait comes too early."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(_BUSY)
        return gradient.clone()


class Late(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Late.apply(values)


def double(tensor: torch.Tensor, **how: Any) -> None:
    torch.cuda._sleep(_BUSY)
    tensor.mul_(2)


def order_streams(rank: int) -> None:
    plain = make_model()
    model = nn.Sequential(*(module for each in make_model() for module in (each, Late()))).cuda()
    ddp = wrapped(model, dist.new_group(backend="nccl"))
    one_by_one(model, "nccl", 1)._register(ddp, True)
    plain(batch_of(0, 0)).sum().backward()
    torch.cuda.synchronize()
    # Not the stream on which DistributedDataParallel was made, which keeps that for its hooks.
    with torch.cuda.stream(torch.cuda.Stream()), patch.object(dist, "all_reduce", double):
        for _ in range(5):
            ddp.zero_grad()
            ddp(batch_of(0, 0)).sum().backward()
            # On the stream of the backward, as an optimizer reads them.
            found = [parameter.grad.clone() for parameter in model.parameters()]
    torch.cuda.synchronize()
    for mine, single in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, 2 * single.grad, rtol=1e-3, atol=1e-3)


def test_the_hook_waits_for_gradients_and_the_optimizer_for_averages() -> None:
    run(1, order_streams)


def plan_on_gpu(rank: int, backend: str) -> None:
    group = dist.new_group(backend=backend)
    model, ranks = make_model(), dist.get_world_size()
    profile = profile_with(FLOAT32, backend=backend, ranks=ranks)
    with trying_all_plans():
        plan = overlap.plan(model, profile, [batch_of(rank, 0)], group=group)
    assert sum(layer.bytes for layer in plan.layers) == 4 * LAYERS * (WIDTH**2 + WIDTH)
    assert all(us > 0 for layer in plan.layers for us in layer.compute_us)
    assert plan.trial is not None and min(plan.trial.planned_us) > 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
def test_a_plan_is_measured_and_tried(backend: str, ranks: int) -> None:
    run(ranks, plan_on_gpu, backend)
