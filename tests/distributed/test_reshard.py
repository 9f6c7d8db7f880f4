"""DistributedModelParallel.reshard moves rows and optimizer states, and training goes on."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding

from tests.distributed import models
from tests.distributed.pipeline.test_torchrec_pipelines import sharded
from tests.distributed.results.test_training import OPTIMIZERS, state_of
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, BoundedLagPipeline
from torchrec_bls.errors import RendezvousError

KINDS = {kind.name: kind for kind in (models.EBC, models.WEIGHTED)}
DEADLINE = 30
PATH = "embeddings"


def new_plan(
    kind: models.Kind, generators: dict[str, Callable[..., Any]], local_size: int | None = None
) -> dict[str, ParameterSharding]:
    """Returns the plan of the tables of `generators` alone."""
    module = kind.module()
    world_size = dist.get_world_size()
    unchanged = {
        config.name: table_wise(rank=0, compute_kernel="fused")
        for config in module.embedding_bag_configs()
    }
    plan = construct_module_sharding_plan(
        module,
        unchanged | generators,
        sharder=kind.torchrec_sharder(),
        world_size=world_size,
        local_size=local_size or world_size,
        device_type="cpu",
    )
    for planned in plan.values():
        planned.compute_kernel = "fused"
    return {name: plan[name] for name in generators}


def reshard(model: DistributedModelParallel, plan: dict[str, ParameterSharding]) -> None:
    model.reshard({PATH: (0.0, plan)}, PATH)


def batch_of(kind: models.Kind, rank: int, step: int) -> Batch:
    dense = torch.rand(5, 4, generator=torch.Generator().manual_seed(step))
    return Batch(dense, models.make_ids(kind, 100 * rank + step, 5), labels=torch.empty(0))


def by_key(output: Any) -> dict[str, torch.Tensor]:
    """The order of keys is that of the ranks of the tables, which moves."""
    return dict(sorted((name, part.detach().clone()) for name, part in output.to_dict().items()))


def train(
    model: DistributedModelParallel, kind: models.Kind, rank: int, steps: range
) -> list[dict[str, torch.Tensor]]:
    outputs = []
    for step in steps:
        _, output = model(batch_of(kind, rank, step))
        loss_of_keys(output).backward()
        outputs.append(by_key(output))
    return outputs


def loss_of_keys(output: Any) -> torch.Tensor:
    """A gradient for every element that does not depend on the order of keys."""
    parts = output.to_dict()
    return sum(
        (
            (parts[name] * torch.arange(parts[name].numel()).sin().view_as(parts[name])).sum()
            for name in sorted(parts)
        ),
        torch.zeros(()),
    )


def whole_state(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Puts weights and optimizer states together from the shards of all ranks."""
    values = dict(model.state_dict())
    for parameter, state in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"{parameter} {name}": value for name, value in state.items()}
    local = [
        (name, tuple(shard.metadata.shard_offsets), shard.tensor.clone())
        for name, value in values.items()
        if hasattr(value, "local_shards")
        for shard in value.local_shards()
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    found: dict[str, torch.Tensor] = {}
    for name, offsets, part in sorted(
        (shard for of_rank in gathered for shard in of_rank), key=lambda shard: shard[:2]
    ):
        # Columns side by side; rows, or one state a row, behind each other.
        side = 1 if any(offsets[1:]) else 0
        found[name] = torch.cat([found[name], part], dim=side) if name in found else part
    return found


MOVES: dict[str, dict[str, Callable[..., Any]]] = {
    # f0, f2 and f4 on rank 0 and f1, f3 on rank 1 before.
    "two tables": {
        "t0": table_wise(rank=1, compute_kernel="fused"),
        "t3": table_wise(rank=0, compute_kernel="fused"),
    },
    "all tables": {
        f"t{i}": table_wise(rank=1 - i % 2, compute_kernel="fused")
        for i in range(models.EBC.tables)
    },
    "all to one rank": {
        f"t{i}": table_wise(rank=1, compute_kernel="fused") for i in range(models.EBC.tables)
    },
}


def reshard_while_training(rank: int, kind: models.Kind, move: str, optimizer: str) -> None:
    fused = OPTIMIZERS[optimizer]
    theirs = sharded(kind, "table_wise", kind.torchrec_sharder(fused))
    expected = train(theirs, kind, rank, range(5))
    ours = sharded(kind, "table_wise", kind.bls_sharder(BLSConfig(deadline=DEADLINE), fused))
    outputs = train(ours, kind, rank, range(2))
    reshard(ours, new_plan(kind, MOVES[move]))
    outputs += train(ours, kind, rank, range(2, 5))
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(whole_state(ours), whole_state(theirs))
    with torch.no_grad():
        batch = batch_of(kind, rank, 6)
        models.assert_same_bits(by_key(ours(batch)[1]), by_key(theirs(batch)[1]))
    reshard(ours, new_plan(kind, MOVES["two tables"]))
    with torch.no_grad():
        models.assert_same_bits(by_key(ours(batch)[1]), by_key(theirs(batch)[1]))


@pytest.mark.parametrize(
    ("kind", "move", "optimizer"),
    slow_but(
        [
            ("ebc", "two tables", "rowwise-adagrad"),
            ("ebc", "all tables", "sgd"),
            ("weighted", "all tables", "rowwise-adagrad"),
            ("weighted", "all to one rank", "rowwise-adagrad"),
        ],
        product(KINDS, MOVES, OPTIMIZERS),
    ),
)
def test_training_goes_on_as_without(kind: str, move: str, optimizer: str) -> None:
    run(2, reshard_while_training, KINDS[kind], move, optimizer)


def reshard_out_of_order(rank: int) -> None:
    kind = models.Kind("weighted", tables=3)
    theirs = sharded(kind, "table_wise", kind.torchrec_sharder())
    expected = train(theirs, kind, rank, range(4))
    ours = sharded(kind, "table_wise", kind.bls_sharder(BLSConfig(deadline=DEADLINE)))
    reshard(ours, new_plan(kind, {"t1": table_wise(rank=0, compute_kernel="fused")}))
    outputs = train(ours, kind, rank, range(2))
    assert not ours.module.embeddings._has_features_permute  # t0, t1, t2 on rank 0
    reshard(ours, new_plan(kind, {"t0": table_wise(rank=1, compute_kernel="fused")}))
    outputs += train(ours, kind, rank, range(2, 4))
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)


def test_before_the_first_batch_and_from_the_order_of_the_batch_to_another() -> None:
    run(2, reshard_out_of_order)


CUTS: dict[str, dict[str, Callable[..., Any]]] = {
    # The even tables lie on ranks 1 and 0 before, the odd ones on 0 and 1, half and half.
    "other ranks": {
        "t0": column_wise(ranks=[0, 1], compute_kernel="fused"),
        "t1": column_wise(ranks=[1, 1], compute_kernel="fused"),
    },
    "other widths": {
        "t1": column_wise(ranks=[1, 0, 1, 1], compute_kernel="fused"),
        "t2": column_wise(ranks=[0], compute_kernel="fused"),
    },
}


def reshard_columns(rank: int, cut: str, optimizer: str) -> None:
    fused = OPTIMIZERS[optimizer]
    theirs = sharded(models.EBC, "column_wise", models.EBC.torchrec_sharder(fused))
    expected = train(theirs, models.EBC, rank, range(5))
    ours = sharded(
        models.EBC, "column_wise", models.EBC.bls_sharder(BLSConfig(deadline=DEADLINE), fused)
    )
    outputs = train(ours, models.EBC, rank, range(2))
    plan = new_plan(models.EBC, CUTS[cut])
    if (cut, optimizer) == ("other widths", "rowwise-adagrad"):
        with pytest.raises(ValueError, match=r"'t1' would be cut into other columns, but its opti"):
            reshard(ours, plan)
    else:
        reshard(ours, plan)
    outputs += train(ours, models.EBC, rank, range(2, 5))
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(whole_state(ours), whole_state(theirs))


@pytest.mark.parametrize(
    ("cut", "optimizer"),
    slow_but(
        [("other ranks", "rowwise-adagrad"), ("other widths", "adagrad")],
        product(CUTS, OPTIMIZERS),
    ),
)
def test_columns_move(cut: str, optimizer: str) -> None:
    run(2, reshard_columns, cut, optimizer)


def reshard_one_of_several_shardings(rank: int) -> None:
    models.set_nodes(2)
    fused = OPTIMIZERS["rowwise-adagrad"]
    ours, unmoved = (
        sharded(
            models.EBC,
            "mixed",
            models.EBC.bls_sharder(BLSConfig(deadline=DEADLINE, name=name), fused),
            nodes=2,
        )
        for name in ("moved", "unmoved")
    )
    expected = train(unmoved, models.EBC, rank, range(6))
    outputs = train(ours, models.EBC, rank, range(2))
    lookups = list(ours.module.embeddings._lookups)
    reshard(ours, new_plan(models.EBC, {"t3": table_row_wise(host_index=0)}, local_size=2))
    kept = [a is b for a, b in zip(ours.module.embeddings._lookups, lookups, strict=True)]
    assert kept == [True, True, True, False]
    outputs += train(ours, models.EBC, rank, range(2, 4))
    reshard(ours, new_plan(models.EBC, {"t0": table_wise(rank=3, compute_kernel="fused")}))
    outputs += train(ours, models.EBC, rank, range(4, 6))
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(whole_state(ours), whole_state(unmoved))


def test_a_table_moves_to_another_node_and_other_shardings_stay() -> None:
    run(4, reshard_one_of_several_shardings)


def reshard_as_torchrec(rank: int) -> None:
    fused = OPTIMIZERS["rowwise-adagrad"]
    outputs, states = [], []
    for sharder in (
        models.EBC.torchrec_sharder(fused),
        models.EBC.bls_sharder(BLSConfig(deadline=DEADLINE), fused),
    ):
        model = sharded(models.EBC, "table_wise", sharder)
        train(model, models.EBC, rank, range(2))
        reshard(model, new_plan(models.EBC, MOVES["two tables"]))
        assert model.plan.plan[PATH]["t0"].ranks == [1]
        train(model, models.EBC, rank, range(2, 4))
        with torch.no_grad():
            outputs.append(models.flatten(model(batch_of(models.EBC, rank, 4))[1]))
        states.append(state_of(model))
    # In TorchRec's order of keys, and with its shards on each rank.
    models.assert_same_bits(outputs[1], outputs[0])
    models.assert_same_bits(states[1], states[0])


@pytest.mark.smoke
def test_two_tables_move_as_in_torchrec() -> None:
    run(2, reshard_as_torchrec)


def keep_learning_rate(rank: int) -> None:
    fused = OPTIMIZERS["sgd"]
    moved, unmoved = (
        sharded(
            models.EBC, "table_wise", models.EBC.bls_sharder(BLSConfig(deadline=DEADLINE), fused)
        )
        for _ in range(2)
    )
    for model in (moved, unmoved):
        for group in model.fused_optimizer.param_groups:
            group["lr"] = 0.003
        model.fused_optimizer.step()
        if model is moved:
            reshard(model, new_plan(models.EBC, MOVES["all to one rank"]))
        train(model, models.EBC, rank, range(1))
        model.fused_optimizer.step()
        train(model, models.EBC, rank, range(1, 2))
    models.assert_same_bits(whole_state(moved), whole_state(unmoved))


def test_the_learning_rate_of_the_moment_is_kept() -> None:
    run(2, keep_learning_rate)


def reshard_under_the_pipeline(rank: int) -> None:
    config = BLSConfig(bound=2, deadline=DEADLINE)
    model = sharded(models.EBC, "table_wise", models.EBC.bls_sharder(config))
    steps = range(6)
    with torch.no_grad():
        reference = sharded(models.EBC, "table_wise", models.EBC.torchrec_sharder())
        expected = [by_key(reference(batch_of(models.EBC, rank, step))[1]) for step in steps]
    pipeline = BoundedLagPipeline(model)
    data = (batch_of(models.EBC, rank, step) for step in steps)
    outputs = [by_key(pipeline.progress(data)[1])]
    with pytest.raises(ValueError, match=r"batches are under way, .* raises StopIteration"):
        reshard(model, new_plan(models.EBC, MOVES["all tables"]))
    outputs += drained(pipeline, data)
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    reshard(model, new_plan(models.EBC, MOVES["all tables"]))
    outputs = drained(pipeline, (batch_of(models.EBC, rank, step) for step in steps))
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)


def drained(pipeline: BoundedLagPipeline[Any, Any], data: Any) -> list[dict[str, torch.Tensor]]:
    outputs = []
    while True:
        try:
            outputs.append(by_key(pipeline.progress(data)[1]))
        except StopIteration:
            return outputs


def test_between_batches_of_the_pipeline() -> None:
    run(2, reshard_under_the_pipeline)


def refuse_changes(rank: int) -> None:
    model = sharded(models.EBC, "table_wise", models.EBC.bls_sharder(BLSConfig(deadline=DEADLINE)))
    reference = sharded(models.EBC, "table_wise", models.EBC.torchrec_sharder())
    train(model, models.EBC, rank, range(1))
    train(reference, models.EBC, rank, range(1))
    other_type = new_plan(models.EBC, {"t0": column_wise(ranks=[0, 1], compute_kernel="fused")})
    unknown = {"t9": new_plan(models.EBC, MOVES["two tables"])["t0"]}
    partly = new_plan(models.EBC, MOVES["two tables"])
    partly["t3"].sharding_spec.shards[0].shard_sizes[0] -= 1
    nowhere = new_plan(models.EBC, MOVES["two tables"])
    nowhere["t0"].ranks = [2]
    for plan, message in (
        (other_type, r"'t0' would change from table_wise with the fused kernel to column_wise"),
        (unknown, r"table 't9' is not one of the module's: \['t0'"),
        (partly, r"shards planned for table 't3' of 64 x 16 do not cover it once"),
        (nowhere, r"shards planned for table 't0' of .* or ranks are not below 2"),
    ):
        with pytest.raises(ValueError, match=message):
            reshard(model, plan)
    dist.barrier()  # a rank that comes now would hear of a refusal that is still to come
    # Other plans on the ranks.
    plan = new_plan(models.EBC, {"t0": table_wise(rank=rank, compute_kernel="fused")})
    with pytest.raises(RendezvousError, match=r"table 0.* on ranks .0.* on ranks .1"):
        reshard(model, plan)
    # One rank refuses.
    if rank == 1:
        del plan["t0"]
        plan = unknown
    with pytest.raises(ValueError if rank == 1 else RendezvousError, match="'t9' is not one"):
        reshard(model, plan)
    # Nothing has changed.
    for output, wanted in zip(
        train(model, models.EBC, rank, range(1, 3)),
        train(reference, models.EBC, rank, range(1, 3)),
        strict=True,
    ):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(state_of(model), state_of(reference))


def test_changes_that_are_refused_change_nothing() -> None:
    run(2, refuse_changes)


def fail_on_one_rank(rank: int) -> None:
    model = sharded(models.EBC, "table_wise", models.EBC.bls_sharder(BLSConfig(deadline=DEADLINE)))
    train(model, models.EBC, rank, range(1))
    before = state_of(model)
    last_step = "torchrec_bls.distributed.reshard._set_learning_rates"
    if rank == 1:
        with mock.patch(last_step, side_effect=OSError), pytest.raises(OSError):
            reshard(model, new_plan(models.EBC, MOVES["two tables"]))
        models.assert_same_bits(state_of(model), before)
    else:
        reshard(model, new_plan(models.EBC, MOVES["two tables"]))
    with pytest.raises(RendezvousError, match=r"plan.*table 0.* on ranks .1.* on ranks .0"):
        train(model, models.EBC, rank, range(1))


def test_a_rank_that_fails_is_not_taken_for_one_with_the_new_plan() -> None:
    run(2, fail_on_one_rank)
