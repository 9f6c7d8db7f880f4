"""Plans that real ranks follow."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
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
from torchrec_bls import BLSEmbeddingBagCollectionSharder, overlap
from torchrec_bls.overlap import hook
from torchrec_bls.overlap.hook import PlannedAllReduce, PlannedBucket
from torchrec_bls.overlap.plan import OverlapPlan
from torchrec_bls.sharding.overlap.timeline import Group

from tests.distributed.dlrm import EMBEDDINGS_IN_DLRM, make_batch, make_whole_dlrm
from tests.distributed.models import CPU, make_plan
from tests.overlap.plans import FLOAT32, UINT8, WIDTH, make_model, plan_of, profile_with
from tests.processes import run

STEPS = 8
GROUPS = {
    "one by one": (Group(1),) * 4,
    "held": (Group(1, hold=2), Group(2, hold=1), Group(1)),
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


def hold(rank: int) -> None:
    plan = plan_of((Group(1, hold=2), Group(3)))
    model = make_model()
    ddp = DistributedDataParallel(model, **plan._buckets_argument())
    happened: list[str] = []
    reduced = dist.all_reduce

    def noting(buffer: torch.Tensor, **how: Any) -> None:
        happened.append(f"all-reduce of {buffer.numel()}")
        reduced(buffer, **how)

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: happened.append(name))
    plan._register(ddp, True)
    with patch.object(dist, "all_reduce", noting):
        for step in range(STEPS):
            happened.clear()
            ddp(batch_of(rank, step)).sum().backward()
    # Held for the third layer from the end, of which the weight comes last.
    assert happened.index("all-reduce of 65") > happened.index("2.weight")
    assert happened.index("all-reduce of 65") < happened.index(f"all-reduce of {3 * 64 * 65}")


def test_a_held_bucket_begins_after_what_it_is_held_for() -> None:
    run(2, hold)


def accumulate(rank: int) -> None:
    """Backwards without synchronization release holds, and the next one holds again."""
    plan = plan_of(GROUPS["held"])
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
    for name, parameter in encoded.items():
        mine, theirs = parameter.grad, exact[name].grad
        assert mine is not None and theirs is not None
        if name.startswith(("6.", "4.")):
            assert not torch.equal(mine, theirs)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0.02 * float(theirs.abs().max()))
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
        model(make_batch(rank, step)).sum().backward()
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

    with patch.object(dist, "all_reduce", broken), pytest.raises(RuntimeError, match="link is down"):
        ddp(batch_of(0, 0)).sum().backward()


def test_a_failed_all_reduce_ends_the_backward() -> None:
    run(1, fail_in_all_reduce)


def wait_in_vain(rank: int) -> None:
    model = make_model()
    names = dict(model.named_parameters())
    buckets = [PlannedBucket(("6.bias",), 4, "float32", "0.weight")]
    group = dist.group.WORLD
    assert group is not None
    state = PlannedAllReduce(model, buckets, group)
    bucket: Any = SimpleNamespace(
        buffer=lambda: torch.zeros(1),
        parameters=lambda: [names["6.bias"]],
        is_last=lambda: False,
        index=lambda: 0,
    )
    with patch.object(hook, "_HOLD_DEADLINE_S", 0.1):
        with pytest.raises(RuntimeError, match="rank 0: bucket 0 was held for '0.weight'"):
            state.reduce(bucket).wait()
    # What comes last releases what is held.
    future = state.reduce(bucket)
    bucket.is_last = lambda: True
    bucket.parameters = lambda: [names["0.weight"]]
    state.reduce(bucket).wait()
    future.wait()


def test_a_hold_has_a_deadline_and_ends_with_the_backward() -> None:
    run(1, wait_in_vain)


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
        PlannedBucket((f"{layer}.bias", f"{other}.weight"), 0, "float32", None)
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


