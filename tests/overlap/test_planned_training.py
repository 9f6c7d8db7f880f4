"""Plans that real ranks follow."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardingPlan

from tests.distributed.dlrm import EMBEDDINGS_IN_DLRM, make_batch, make_whole_dlrm
from tests.distributed.models import CPU, make_plan
from tests.overlap.plans import FLOAT32, UINT8, WIDTH, make_model, plan_of, profile_with
from tests.processes import run
from torchrec_bls import BLSEmbeddingBagCollectionSharder, overlap
from torchrec_bls.overlap import hook
from torchrec_bls.overlap.bucket_plan import OverlapPlan
from torchrec_bls.overlap.hook import PlannedAllReduce, PlannedBucket
from torchrec_bls.overlap.search.timeline import Group

STEPS = 8
GROUPS = {
    "one by one": (Group(1),) * 4,
    "several": (Group(1), Group(2), Group(1)),
    "all": (Group(4),),
}


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.rand(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


@contextmanager
def noting_buckets(found: list[frozenset[str]]) -> Iterator[None]:
    reduce = PlannedAllReduce.reduce

    def noting(self: PlannedAllReduce, bucket: Any) -> Any:
        found.append(frozenset(self._names[each] for each in bucket.parameters()))
        return reduce(self, bucket)

    with patch.object(PlannedAllReduce, "reduce", noting):
        yield


def train(ddp: nn.Module, rank: int) -> list[bytes]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(batch_of(rank, step)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().numpy().tobytes() for parameter in ddp.parameters()]


def follow(rank: int, groups: tuple[Group, ...], backend: str) -> None:
    plan = plan_of(groups, backend=backend)
    group = dist.new_group(backend=backend)
    ddp = DistributedDataParallel(make_model(), process_group=group, **plan._buckets_argument())
    buckets: list[frozenset[str]] = []
    with noting_buckets(buckets):
        plan._register(ddp, True)
        weights = train(ddp, rank)
    last = buckets[-len(groups) :]
    assert last == [frozenset(each.parameters) for each in plan.buckets]
    # The sum of two floats has the same bits in any order.
    default = DistributedDataParallel(make_model(), process_group=dist.new_group(backend=backend))
    assert weights == train(default, rank)


@pytest.mark.parametrize("backend", ["gloo", "bls"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_ddp_follows_and_trains_as_by_default(groups: tuple[Group, ...], backend: str) -> None:
    run(2, follow, groups, backend)


def accumulate(rank: int) -> None:
    plan = plan_of(GROUPS["several"])
    ddp = DistributedDataParallel(make_model(), **plan._buckets_argument())
    plan._register(ddp, True)
    default = DistributedDataParallel(make_model())
    for each in (ddp, default):
        for step in range(STEPS):
            each.zero_grad()
            with each.no_sync():
                each(batch_of(rank, step)).sum().backward()
            each(batch_of(rank, step + 1)).sum().backward()
    for mine, theirs in zip(ddp.parameters(), default.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_gradients_accumulate_without_synchronization() -> None:
    run(2, accumulate)


def encode(rank: int) -> None:
    plan = plan_of((Group(2, mode=1), Group(2)), FLOAT32, UINT8)
    ddp = DistributedDataParallel(make_model(), **plan._buckets_argument())
    plan._register(ddp, True)
    default = DistributedDataParallel(make_model())
    for step in range(5):
        for each in (ddp, default):
            each.zero_grad()
            each(batch_of(rank, step)).sum().backward()
    encoded, exact = (dict(each.module.named_parameters()) for each in (ddp, default))
    largest = max(float(p.grad.abs().max()) for name, p in exact.items() if name[0] in "64")
    for name, parameter in encoded.items():
        mine, theirs = parameter.grad, exact[name].grad
        assert mine is not None and theirs is not None
        if name.startswith(("6.", "4.")):
            assert not torch.equal(mine, theirs)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0.02 * largest)
        else:
            assert torch.equal(mine, theirs)


def test_encoded_buckets_beside_exact_ones() -> None:
    run(2, encode)


def plan_and_follow_dlrm(rank: int, sharder: Any) -> None:
    model = make_whole_dlrm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profile = profile_with(FLOAT32)
    plan = overlap.plan(model, profile, [make_batch(rank, step) for step in range(2)])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    assert plans == [plan] * len(plans)
    dense = [name for name, _ in model.named_parameters() if "embedding_bags" not in name]
    assert sorted(name for layer in plan.layers for name in layer.parameters) == sorted(dense)
    # The top of the model is the first to have its gradients, the bottom the last.
    assert "over_arch" in plan.layers[0].parameters[0]
    assert "dense_arch" in plan.layers[-1].parameters[-1]

    buckets: list[frozenset[str]] = []
    with noting_buckets(buckets), replacing_defaults():
        weights = train_dlrm(plan.wrapper(), rank, sharder)
    assert buckets[-len(plan.buckets) :] == [frozenset(each.parameters) for each in plan.buckets]
    assert weights == train_dlrm(DefaultDataParallelWrapper(), rank, sharder)


def replacing_defaults() -> Any:
    return patch.object(OverlapPlan, "replaces_torchrec_default", True)


def train_dlrm(wrapper: Any, rank: int, sharder: Any) -> list[bytes]:
    whole = make_whole_dlrm()
    tables = whole.get_submodule(f"model.{EMBEDDINGS_IN_DLRM}")
    types = ("table_wise", "row_wise", "column_wise", "table_wise", "row_wise")
    torch.manual_seed(0)  # TorchRec draws its shards anew
    model = DistributedModelParallel(
        whole,
        device=CPU,
        plan=ShardingPlan({f"model.{EMBEDDINGS_IN_DLRM}": make_plan(tables, types, sharder)}),
        sharders=[sharder],
        data_parallel_wrapper=wrapper,
    )
    dense = [each for name, each in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        # Of as many samples on all ranks, which TorchRec's own backward over gloo needs.
        model(make_batch(rank, 4 * step - rank)).sum().backward()
        optimizer.step()
    return [parameter.detach().numpy().tobytes() for parameter in dense]


@pytest.mark.parametrize(
    "sharder",
    [
        EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1}),
        BLSEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1}),
    ],
    ids=["torchrec", "bls"],
)
def test_a_dlrm_under_distributed_model_parallel(sharder: Any) -> None:
    run(2, plan_and_follow_dlrm, sharder)


def fail_in_all_reduce(rank: int) -> None:
    plan = plan_of((Group(1),) * 4, ranks=1)
    ddp = DistributedDataParallel(make_model(), **plan._buckets_argument())
    plan._register(ddp, True)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the link is down")

    with (
        patch.object(dist, "all_reduce", broken),
        pytest.raises(RuntimeError, match="link is down"),
    ):
        ddp(batch_of(0, 0)).sum().backward()


def test_a_failed_all_reduce_ends_the_backward() -> None:
    run(1, fail_in_all_reduce)


def end_with_the_timeout_of_the_group(rank: int) -> None:
    """The other rank makes no backward."""
    plan = plan_of((Group(4),))
    group = dist.new_group(timeout=timedelta(seconds=5))
    ddp = DistributedDataParallel(make_model(), process_group=group, **plan._buckets_argument())
    plan._register(ddp, True)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
            ddp(batch_of(0, 0)).sum().backward()
    dist.barrier()


def test_an_all_reduce_ends_with_the_timeout_of_the_group() -> None:
    run(2, end_with_the_timeout_of_the_group)


def change_the_order(rank: int) -> None:
    """The plan is of the other order of two branches."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = Branches()
    names = [name for name, _ in model.named_parameters()]
    assert names == ["a.weight", "a.bias", "b.weight", "b.bias"]
    buckets = [
        PlannedBucket((f"{layer}.bias", f"{other}.weight"), 0, "float32")
        for layer, other in (("a", "b"), ("b", "a"))
    ]
    group = dist.group.WORLD
    assert group is not None
    ddp = DistributedDataParallel(model, bucket_cap_mb_list=[4 * 64 * 65 / 2**20])
    ddp.register_comm_hook(PlannedAllReduce(model, buckets, group), hook.planned_all_reduce_hook)

    def step() -> None:
        ddp(batch_of(rank, 0)).sum().backward()

    for _ in range(4):
        step()
    with pytest.warns(UserWarning, match="rank 0: no bucket of the plan has 'b.bias'"):
        step()


def test_another_order_than_the_plan_is_said_once() -> None:
    run(1, change_the_order)
