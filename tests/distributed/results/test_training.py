"""Training at bound 0 updates weights and optimizer states as TorchRec does, bit for bit."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

from tests.distributed import models
from tests.distributed.models import shard
from tests.distributed.results.rank_order import in_rank_order
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
NODES = {2: 2, 3: 1, 4: 2, 8: 2}
STEPS = 10
# FBGEMM has no Adam for CPU.
OPTIMIZERS = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8},
    "rowwise-adagrad": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.1,
        "eps": 1e-8,
    },
}


def loss_of(outputs: Any) -> torch.Tensor:
    """Gives every element of the outputs a gradient of its own."""
    tensors = (
        [outputs.values()]
        if isinstance(outputs.values(), torch.Tensor)
        else [jagged.values() for jagged in outputs.values()]
    )
    return sum(
        ((t * torch.arange(t.numel(), dtype=t.dtype).sin().view(t.shape)).sum() for t in tensors),
        torch.zeros(()),
    )


def train(
    model: DistributedModelParallel, kind: models.Kind, rank: int, *, uneven: bool, empty: str
) -> list[dict[str, torch.Tensor]]:
    """Trains `STEPS` steps and returns the outputs of each.

    Args:
        uneven: give the ranks batches of different sizes.
        empty: what rank 1 gets in step 4: "no samples", or "no ids" in its only sample, which
            changes the weights as little.
    """
    outputs = []
    for step in range(STEPS):
        samples = 3 + (rank + step) % 4 if uneven else 5
        ids = models.make_ids(kind, 100 * rank + step, samples)
        if uneven and rank == 1 and step == 4:
            ids = models.make_ids(kind, 0, 0 if empty == "no samples" else 1, most_ids=0)
        output = models.arrived(model(models.Batch(ids)))
        loss_of(output).backward()
        outputs.append(models.flatten(output))
    return outputs


def state_of(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Returns weights and optimizer state on this rank."""
    state = {name: shard.clone() for name, (_, _, shard) in models.local_shards(model).items()}
    for parameter, values in model.fused_optimizer.state_dict()["state"].items():
        for name, value in values.items():
            shards = value.local_shards() if hasattr(value, "local_shards") else None
            tensors = [value] if shards is None else [s.tensor for s in shards]
            for i, tensor in enumerate(tensors):
                state[f"{parameter} {name} {i}"] = tensor.detach().clone()
    return state


def train_both(rank: int, kind: models.Kind, nodes: int, optimizer: str, uneven: bool) -> None:
    """Compares with TorchRec, whose sums are put in rank order from three ranks on."""
    models.set_nodes(nodes)
    two_ranks = torch.distributed.get_world_size() == 2
    fused = OPTIMIZERS[optimizer]
    theirs = shard(kind, "mixed", kind.torchrec_sharder(fused), nodes)
    # Two terms have one sum in either order, and gloo gathers even sizes.
    with nullcontext() if two_ranks and not uneven else in_rank_order():
        expected = train(theirs, kind, rank, uneven=uneven, empty="no ids")
    ours = shard(kind, "mixed", kind.bls_sharder(BLSConfig(), fused), nodes)
    before = state_of(ours)
    outputs = train(ours, kind, rank, uneven=uneven, empty="no samples")
    for step, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if not (uneven and rank == 1 and step == 4):
            models.assert_same_bits(output, wanted)
    after = state_of(ours)
    models.assert_same_bits(after, state_of(theirs))
    assert not after or any(not torch.equal(after[name], before[name]) for name in after)
    states = [name for name in after if "momentum" in name]
    assert bool(states) == (bool(after) and optimizer != "sgd"), list(after)


SMOKE = ("ec", 2, "sgd", "uneven")
CASES = [
    (kind, *how)
    for kind in KINDS
    for how in (
        (2, "sgd", "even"),
        (2, "sgd", "uneven"),
        (2, "adagrad", "even"),
        (2, "rowwise-adagrad", "even"),
        (3, "rowwise-adagrad", "uneven"),
        (4, "rowwise-adagrad", "uneven"),
        (8, "rowwise-adagrad", "uneven"),
    )
    # Eight ranks take as long as all others of a kind.
    if (kind, *how) != SMOKE and (how[0] < 8 or kind == "weighted")
]
KEPT = [("ebc", 2, "adagrad", "even"), ("weighted", 4, "rowwise-adagrad", "uneven")]


@pytest.mark.parametrize(
    ("kind", "world_size", "optimizer", "batches"),
    [pytest.param(*SMOKE, marks=pytest.mark.smoke), *slow_but(KEPT, CASES)],
)
def test_weights_and_optimizer_states_after_ten_steps(
    kind: str, world_size: int, optimizer: str, batches: str
) -> None:
    run(
        world_size,
        train_both,
        KINDS[kind],
        NODES[world_size],
        optimizer,
        batches == "uneven",
        deadline=120,
    )


def train_without_division(rank: int) -> None:
    states = {}
    models.set_nodes(2)
    division = get_gradient_division()
    for kind in KINDS.values():
        for divide in (True, False):
            set_gradient_division(divide)
            theirs = shard(kind, "mixed", kind.torchrec_sharder(), 2)
            ours = shard(kind, "mixed", kind.bls_sharder(BLSConfig()), 2)
            for model in (theirs, ours):
                train(model, kind, rank, uneven=False, empty="")
            states[divide] = state_of(ours)
            models.assert_same_bits(states[divide], state_of(theirs))
        for name, divided in states[True].items():
            assert not torch.equal(divided, states[False][name])
    set_gradient_division(division)


def test_gradients_are_divided_as_torchrecs_switch_says() -> None:
    run(2, train_without_division)


def forward_with_autograd(rank: int, kind: models.Kind) -> None:
    model = shard(kind, "table_wise", kind.bls_sharder(BLSConfig(bound=1)))
    ids = models.make_ids(kind, rank, 3)
    with pytest.raises(
        ValueError,
        match=rf"embeddings on rank {rank}: bound is 1 and autograd is on: gradients of up to 1 "
        r"iterations ago .* torch.no_grad\(\) for inference, or bound 0 for training",
    ):
        models.flatten(model(models.Batch(ids)))
    with torch.no_grad():
        assert models.flatten(model(models.Batch(ids)))  # the next batch is not affected


@pytest.mark.parametrize("kind", slow_but(["ec"], KINDS))
def test_a_bound_is_refused_under_autograd(kind: str) -> None:
    run(2, forward_with_autograd, KINDS[kind])
