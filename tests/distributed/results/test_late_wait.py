"""The wait for the embeddings' gradients comes last in a backward, and changes no bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from tests.distributed.results.test_training import loss_of, state_of
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig
from torchrec_bls.distributed.exchanges.exchange import Exchange, Pending
from torchrec_bls.distributed.outputs import output_dist

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
OF_EC = ("table_wise", "row_wise", "column_wise", "mixed")
OF_EBC = (*OF_EC, "table_row_wise", "table_column_wise", "grid_shard")
STEPS = 50
DENSE = 3
SAMPLES = 4


class Parts(nn.Module):
    """Embedding modules beside a bottom MLP of two layers, whose output scales their loss.

    Args:
        embeddings: by name.
        uses: names in the order of their lookups, several times where they are looked up so often.
    """

    def __init__(self, embeddings: dict[str, nn.Module], uses: list[str]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 5), nn.ReLU(), nn.Linear(5, 1))
        self.embeddings = nn.ModuleDict(embeddings)
        self._uses = uses

    def forward(self, dense: torch.Tensor, ids: list[Any]) -> torch.Tensor:
        scale = self.bottom(dense).mean()
        outputs = [self.embeddings[name](each) for name, each in zip(self._uses, ids, strict=True)]
        losses = [loss_of(models.arrived(output)) for output in outputs]
        return scale * sum(losses, torch.zeros(()))


def shard(
    kind: models.Kind, shardings: dict[str, str], uses: list[str]
) -> DistributedModelParallel:
    nodes = 2
    models.set_nodes(nodes)
    sharder = kind.bls_sharder(BLSConfig())
    modules = {name: kind.module() for name in shardings}
    plans = {
        f"embeddings.{name}": models.make_plan(
            modules[name], models.sharding_types(kind, sharding, nodes), sharder, nodes
        )
        for name, sharding in shardings.items()
    }
    return models.shard_model(Parts(modules, uses), plans, [sharder])


@contextmanager
def early_wait() -> Iterator[None]:
    """The numbers that the forward gives, in which the wait comes before the bottom MLP."""
    with mock.patch.object(output_dist, "run_last", lambda output, place: None):
        yield


def inputs(kind: models.Kind, rank: int, step: int, uses: int) -> tuple[torch.Tensor, list[Any]]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    dense = torch.rand(SAMPLES, DENSE, generator=generator)
    seeds = [10_000 * use + 100 * step + rank for use in range(uses)]
    return dense, [models.make_ids(kind, seed, SAMPLES) for seed in seeds]


def train(
    model: DistributedModelParallel, kind: models.Kind, rank: int, steps: int
) -> dict[str, torch.Tensor]:
    """Returns loss and gradients of each step and all weights at the end.

    The gradients of two steps are added up before the dense weights change.
    """
    uses = len(model.module._uses)
    dense = list(model.module.bottom.parameters())
    optimizer = torch.optim.SGD(dense, lr=1e-3)
    results = {}
    for step in range(steps):
        loss = model(*inputs(kind, rank, step, uses))
        loss.backward()
        results[f"{step} loss"] = loss.detach().clone()
        results |= {f"{step} {i}": p.grad.clone() for i, p in enumerate(dense)}
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    weights = {f"dense {i}": p.detach().clone() for i, p in enumerate(dense)}
    return results | weights | state_of(model)


def compare(
    rank: int, kind: models.Kind, shardings: dict[str, str], uses: list[str], steps: int
) -> None:
    with early_wait():
        expected = train(shard(kind, shardings, uses), kind, rank, steps)
    model = shard(kind, shardings, uses)
    before = state_of(model)
    found = train(model, kind, rank, steps)
    models.assert_same_bits(found, expected)
    assert not before or any(not torch.equal(found[name], before[name]) for name in before)


def compare_types(rank: int, kind: models.Kind, types: tuple[str, ...]) -> None:
    for sharding in types:
        compare(rank, kind, {"only": sharding}, ["only"], STEPS)


CASES = [
    *(("ec", 2, (sharding,)) for sharding in OF_EC),
    *(("ebc", 2, (sharding,)) for sharding in OF_EBC if sharding != "grid_shard"),
    # In a grid TorchRec gets means wrong.
    *(("weighted", 2, (sharding,)) for sharding in ("grid_shard", "mixed")),
    # Types one by one are for two ranks; the mix has a table of most.
    ("ec", 4, ("mixed",)),
    ("weighted", 4, ("mixed", "table_column_wise", "grid_shard")),
]


@pytest.mark.parametrize(
    ("kind", "world_size", "types"), slow_but([c for c in CASES if c[1] == 2], CASES)
)
def test_fifty_steps_have_the_bits_of_an_early_wait(
    kind: str, world_size: int, types: tuple[str, ...]
) -> None:
    run(world_size, compare_types, KINDS[kind], types, deadline=300)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_several_modules_and_a_module_used_twice_have_the_bits_of_an_early_wait(kind: str) -> None:
    shardings = {"a": "mixed", "b": "row_wise"}
    run(2, compare, KINDS[kind], shardings, ["a", "b", "a"], 20)


def events_of(model: DistributedModelParallel, step: Callable[[], object]) -> list[str]:
    """What `step` does, in its order: "send", "wait" and "bottom", a gradient of the bottom MLP."""
    events = []
    post, wait = Exchange.post, Pending.wait

    def noted_post(self: Exchange, *arguments: Any) -> Any:
        if self.name.endswith("gradients"):
            events.append("send")
        return post(self, *arguments)

    def noted_wait(self: Pending[Any]) -> Any:
        if self.channel.name.endswith("gradients"):
            events.append("wait")
        return wait(self)

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("bottom"))
        for parameter in model.module.bottom.parameters()
    ]
    with (
        mock.patch.object(Exchange, "post", noted_post),
        mock.patch.object(Pending, "wait", noted_wait),
    ):
        step()
    for hook in hooks:
        hook.remove()
    return events


def note_order(rank: int, kind: models.Kind) -> None:
    bottom = ["bottom"] * 4

    def events() -> list[str]:
        model = shard(kind, {"a": "table_wise", "b": "row_wise"}, ["a", "b"])
        return events_of(model, lambda: model(*inputs(kind, rank, 0, 2)).backward())

    assert events() == ["send", "send", *bottom, "wait", "wait"]
    with early_wait():
        assert events() == ["send", "send", "wait", "wait", *bottom]


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_gradients_are_sent_before_the_bottom_mlp_and_waited_for_behind_it(kind: str) -> None:
    run(2, note_order, KINDS[kind])


def note_buckets(rank: int, kind: models.Kind) -> None:
    model = shard(kind, {"only": "table_wise"}, ["only"])
    events: list[str] = []

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        events.append("bucket")
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model._dmp_wrapped_module.register_comm_hook(None, hook)
    wait = Pending.wait

    def noted_wait(self: Pending[Any]) -> Any:
        if self.channel.name.endswith("gradients"):
            events.append("wait")
        return wait(self)

    with mock.patch.object(Pending, "wait", noted_wait):
        for step in range(3):
            events.clear()
            model(*inputs(kind, rank, step, 1)).backward()
    # TorchRec takes the graph for static, which DistributedDataParallel looks at in the first step.
    assert events == ["bucket", "wait"], events


def test_buckets_of_the_dense_gradients_leave_before_the_wait() -> None:
    run(2, note_buckets, models.EBC)


def go_backward_twice(rank: int, kind: models.Kind) -> dict[str, torch.Tensor]:
    model = shard(kind, {"a": "mixed"}, ["a", "a"])
    loss = model(*inputs(kind, rank, 0, 2))
    loss.backward(retain_graph=True)
    loss.backward()
    with torch.no_grad():
        later = model(*inputs(kind, rank, 1, 2))
    return {"later": later, **state_of(model)}


def compare_retained(rank: int, kind: models.Kind) -> None:
    with early_wait():
        expected = go_backward_twice(rank, kind)
    models.assert_same_bits(go_backward_twice(rank, kind), expected)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_a_retained_graph_goes_backward_twice(kind: str) -> None:
    run(2, compare_retained, KINDS[kind])


def go_backward_through_an_older_forward(rank: int, kind: models.Kind) -> dict[str, torch.Tensor]:
    """The loss of step 0 is part of that of step 2; step 1 goes backward in between."""
    model = shard(kind, {"a": "mixed"}, ["a"])
    for step in range(0, 30, 3):
        losses = []
        for each in range(step, step + 3):
            losses.append(model(*inputs(kind, rank, each, 1)))
            if each == step + 1:
                losses.pop().backward()
        sum(losses, torch.zeros(())).backward()
    return state_of(model)


def compare_older_forwards(rank: int, kind: models.Kind) -> None:
    with early_wait():
        expected = go_backward_through_an_older_forward(rank, kind)
    models.assert_same_bits(go_backward_through_an_older_forward(rank, kind), expected)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_an_older_forward_has_the_bits_of_an_early_wait(kind: str) -> None:
    run(2, compare_older_forwards, KINDS[kind])


def fail_in_a_backward(rank: int, kind: models.Kind) -> None:
    """Rank 1's bottom MLP raises in the backward of step 1, and all go on."""
    model = shard(kind, {"only": "mixed"}, ["only"])
    before = state_of(model)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("no gradient today")

    # DistributedDataParallel would miss the gradients of that step.
    local = model.module
    for step in range(4):
        loss = local(*inputs(kind, rank, step, 1))
        if rank == 1 and step == 1:
            hook = local.bottom[0].weight.register_hook(fail)
            with pytest.raises(RuntimeError, match="no gradient today"):
                loss.backward()
            hook.remove()
            assert local.embeddings["only"].under_way
            changed = state_of(model)
        else:
            loss.backward()
            assert not local.embeddings["only"].under_way
    after = state_of(model)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    if rank == 1:
        assert any(not torch.equal(after[name], changed[name]) for name in after)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_training_goes_on_after_an_exception_in_a_backward(kind: str) -> None:
    run(2, fail_in_a_backward, KINDS[kind])


def wait_without_autograd(rank: int, kind: models.Kind) -> None:
    model = shard(kind, {"only": "table_wise"}, ["only"]).module.embeddings["only"]
    output = model(models.make_ids(kind, rank, SAMPLES))
    with torch.no_grad():
        assert models.flatten(output)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_embeddings_may_be_waited_for_without_autograd(kind: str) -> None:
    run(2, wait_without_autograd, KINDS[kind])
