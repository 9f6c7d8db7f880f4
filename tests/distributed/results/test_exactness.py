"""Outputs of bounded-lag modules are TorchRec's, bit for bit, for all batches and bounds."""

import itertools
import random
import time
import traceback
from collections.abc import Sequence

import pytest
import torch
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from tests.distributed.results.rank_order import in_rank_order
from tests.processes import run
from tests.tiers import slow_where
from torchrec_bls import BLSConfig, BoundedLagPipeline

Output = dict[str, torch.Tensor]

# Ranks to the number of hosts they pretend to be on; table-row-wise needs more than one.
NODES = {2: 2, 3: 1, 4: 2, 8: 2}
KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
BOUNDS = [0, 1, 2, 4]


def shardings_of(world_size: int, kind: str) -> list[str]:
    """At eight ranks only the mix, which has a table of every type."""
    types = [*(models.MIXES[kind] if world_size < 8 else ()), "mixed"]
    return [each for each in types if each != "table_row_wise" or NODES[world_size] > 1]


def is_slow(case: tuple[int, str]) -> bool:
    """Two ranks are on two nodes, so that all sharding types come up."""
    world_size, kind = case
    return world_size != 2 or kind == "ebc"


def batches_of(kind: models.Kind, rank: int) -> list[KeyedJaggedTensor]:
    """Batches of every awkward kind; a sample of 0 ids stands where TorchRec needs one."""
    uneven = [5, 1, 7, 3, 4, 6, 2, 1][rank]
    seed = 100 * rank
    return [
        models.make_ids(kind, seed, uneven),
        models.make_ids(kind, seed + 1, uneven + 2, dtype=torch.int32),
        models.make_ids(kind, seed + 2, 4, without=["f1", "f3"]),
        models.make_ids(kind, seed + 3, 0 if rank % 2 else 3),
        models.make_ids(kind, seed + 4, 0),
        models.make_ids(kind, seed + 5, 3, most_ids=0),
        models.make_ids(kind, seed + 6, 40, most_ids=9),
    ]


def with_a_sample(kind: models.Kind, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """TorchRec cannot do batches without samples, and samples do not influence each other."""
    return ids if ids.stride() else models.make_ids(kind, 0, 1, most_ids=0)


def without_samples(output: Output) -> Output:
    return {name: tensor[:0] for name, tensor in output.items()}


def forward(model: DistributedModelParallel, ids: KeyedJaggedTensor) -> Output:
    with torch.no_grad():
        return models.flatten(model(models.Batch(ids)))


def torchrec_outputs(
    kind: models.Kind, sharding: str, nodes: int, batches: Sequence[KeyedJaggedTensor]
) -> list[Output]:
    model = models.shard(kind, sharding, kind.torchrec_sharder(), nodes)
    with in_rank_order():
        outputs = [forward(model, with_a_sample(kind, ids)) for ids in batches]
    return [
        out if ids.stride() else without_samples(out)
        for out, ids in zip(outputs, batches, strict=True)
    ]


def piped_outputs(
    kind: models.Kind,
    sharding: str,
    nodes: int,
    config: BLSConfig,
    batches: Sequence[KeyedJaggedTensor],
) -> list[Output]:
    model = models.shard(kind, sharding, kind.bls_sharder(config), nodes)
    pipeline = BoundedLagPipeline[models.Batch, object](model)
    late = random.Random(torch.distributed.get_rank())

    def load() -> object:
        for ids in batches:
            time.sleep(late.uniform(0, 0.005))
            yield models.Batch(ids)

    batch, outputs = load(), []
    for _ in batches:
        outputs.append(models.flatten(pipeline.progress(batch)))
    with pytest.raises(StopIteration):
        pipeline.progress(batch)
    return outputs


def compare_with_torchrec(rank: int, world_size: int, kind: models.Kind) -> dict[str, str | None]:
    """Returns for each sharding, and each bound with it, what was wrong."""
    nodes = NODES[world_size]
    models.set_nodes(nodes)
    batches = batches_of(kind, rank)
    failures: dict[str, str | None] = {}

    def note(case: str, ours: Sequence[Output], theirs: Sequence[Output]) -> None:
        failures[case] = None
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            try:
                models.assert_same_bits(*pair)
            except AssertionError:
                failures[case] = f"{case}: rank {rank}, batch {i}: {traceback.format_exc()}"

    for sharding in shardings_of(world_size, kind.name):
        theirs = torchrec_outputs(kind, sharding, nodes, batches)
        model = models.shard(kind, sharding, kind.bls_sharder(BLSConfig()), nodes)
        ours = [forward(model, ids) for ids in batches]
        note(sharding, ours, theirs)
        direct = models.shard(kind, sharding, kind.bls_sharder(BLSConfig(lookup="direct")), nodes)
        note(f"{sharding}, direct", [forward(direct, ids) for ids in batches], ours)
        for bound in BOUNDS:
            piped = piped_outputs(kind, sharding, nodes, BLSConfig(bound=bound), batches)
            note(f"{sharding}, bound {bound}", piped, ours)
    return failures


def forward_from_the_empty_ones(rank: int) -> None:
    for kind in KINDS.values():
        batches = batches_of(kind, rank)[3:]
        for first in (0, 1):
            theirs = torchrec_outputs(kind, "mixed", 1, batches[first:])
            model = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig()))
            for ids, expected in zip(batches[first:], theirs, strict=True):
                models.assert_same_bits(forward(model, ids), expected)


def test_a_first_batch_without_samples() -> None:
    run(3, forward_from_the_empty_ones)


def forward_with_indices(rank: int) -> None:
    module = EmbeddingCollection(tables=models.EC.module().embedding_configs(), need_indices=True)
    outputs = []
    for sharder in (models.EC.torchrec_sharder(), models.EC.bls_sharder(BLSConfig())):
        plan = models.make_plan(module, models.sharding_types(models.EC, "mixed", 1), sharder)
        model = models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
        with torch.no_grad():
            outputs.append(models.arrived(model(models.Batch(models.make_ids(models.EC, rank, 3)))))
    theirs, ours = outputs
    for name, jagged in ours.items():
        assert torch.equal(jagged.weights(), theirs[name].weights())
    with torch.no_grad():
        no_samples = models.arrived(model(models.Batch(models.make_ids(models.EC, rank, 2 * rank))))
    for jagged in no_samples.values():
        assert jagged.weights().shape == jagged.values().shape[:1]


@pytest.mark.smoke
def test_ids_come_with_the_embeddings_where_asked_for() -> None:
    run(2, forward_with_indices)


@pytest.mark.parametrize(
    ("world_size", "kind"), slow_where(is_slow, list(itertools.product(NODES, KINDS)))
)
def test_outputs_are_torchrecs_without_a_pipeline_in_one_of_every_bound_and_read_directly(
    world_size: int, kind: str
) -> None:
    for found in run(world_size, compare_with_torchrec, world_size, KINDS[kind], deadline=200):
        assert [failure for failure in found.values() if failure] == []
        assert len(found) == len(shardings_of(world_size, kind)) * (2 + len(BOUNDS))
