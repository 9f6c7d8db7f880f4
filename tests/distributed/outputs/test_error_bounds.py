"""Sharded modules whose embeddings travel within error bounds."""

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from tests.distributed.outputs.test_codecs import rounding_by
from tests.distributed.results.test_exactness import batches_of, forward, piped_outputs
from tests.processes import run, run_outcomes
from tests.tiers import slow_but, slow_where
from torchrec_bls import BLSConfig, CodecConfig, Decay, ErrorBound
from torchrec_bls.codecs.error_bound import factor_at
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.codecs.torchrec_codecs import codecs_registry

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
BOUNDS = {"t0": 0.01, "t1": 0.03, "t2": 0.05, "t3": 0.02, "t4": 0.04}
NODES = {2: 2, 3: 1, 4: 2}


def on_the_grid(rows: torch.Tensor, bound: float, bits: int = 8) -> torch.Tensor:
    """Returns what arrives of values that a grid of so many bits has room for."""
    exact = 2 * bound * (1 - 2.0 ** -(23 - bits))
    mantissa, exponent = np.frexp(exact)
    step = np.float32(np.ldexp(np.floor(np.ldexp(mantissa, 24 - bits)), exponent - (24 - bits)))
    steps = np.rint(rows.numpy() * (np.float32(1) / step)) + np.float32(0)  # no -0
    assert abs(steps).max(initial=0) < 2 ** (bits - 1), "the test's values need a wider grid"
    return torch.from_numpy(steps * step)


def embeddings_of(model: DistributedModelParallel) -> Any:
    (embeddings,) = model.module.children()
    return embeddings


def round_lookups(model: DistributedModelParallel, kind: models.Kind, factor: float = 1.0) -> None:
    """Has the lookups of a model return what would arrive of their rows."""
    ranks = torch.distributed.get_world_size()
    embeddings = embeddings_of(model)
    types = [str(each) for each in getattr(embeddings, "_sharding_types", [])]
    types = types or list(embeddings._sharding_type_to_sharding)
    for sharding_type, lookup in zip(types, embeddings._lookups, strict=True):
        addends = 1
        if kind.name != "ec":
            nodes = NODES[ranks]
            addends = {"row_wise": ranks, "table_row_wise": ranks // nodes}.get(sharding_type, 1)
        shards = [
            (np.float32(BOUNDS[table.name] * factor / addends), table.local_cols)
            for kernel in lookup._emb_modules
            for table in kernel.config.embedding_tables
            for _ in table.feature_names
        ]
        lookup.register_forward_hook(rounding_by(on_the_grid, kind, shards))


def compare_forward(rank: int, world_size: int, kind: models.Kind) -> None:
    nodes = NODES[world_size]
    models.set_nodes(nodes)
    exact = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(name="exact")), nodes)
    plain = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(name="plain")), nodes)
    round_lookups(plain, kind)
    # TorchRec cannot look up batches without samples, unlike the exchange.
    batches = [ids for ids in batches_of(kind, rank) if ids.stride() > 0 or kind.name == "ec"]
    batches = batches[:3] + batches[-1:]
    expected = [forward(plain, ids) for ids in batches]
    codecs = CodecConfig(forward={table: ErrorBound(bound) for table, bound in BOUNDS.items()})
    for transport in ("shm", "tcp"):
        config = BLSConfig(codecs=codecs, transport=transport)
        model = models.shard(kind, "mixed", kind.bls_sharder(config), nodes)
        for ids, wanted in zip(batches, expected, strict=True):
            output = forward(model, ids)
            models.assert_same_bits(output, wanted)
            for name, values in forward(exact, ids).items():
                assert ((values - output[name]).abs() <= max(BOUNDS.values()) * 1.00001).all()
    config = BLSConfig(bound=2, codecs=codecs)
    for output, wanted in zip(
        piped_outputs(kind, "mixed", nodes, config, batches), expected, strict=True
    ):
        models.assert_same_bits(output, wanted)


@pytest.mark.parametrize("world_size", slow_where(lambda ranks: ranks != 2, NODES))
@pytest.mark.parametrize("kind", slow_but(["weighted", "ec"], KINDS))
def test_embeddings_are_those_of_the_grid_and_within_their_bounds(
    kind: str, world_size: int
) -> None:
    run(world_size, compare_forward, world_size, KINDS[kind])


DECAY = Decay(start=3.0, iterations=8, steps=4)


def decaying(kind: models.Kind) -> DistributedModelParallel:
    bounds = {table: ErrorBound(bound, DECAY) for table, bound in BOUNDS.items()}
    config = BLSConfig(codecs=CodecConfig(forward=bounds), deadline=20)
    return models.shard(kind, "table_wise", kind.bls_sharder(config))


def step(model: DistributedModelParallel, kind: models.Kind, seed: int) -> None:
    output = models.arrived(model(models.Batch(models.make_ids(kind, seed, 4))))
    parts = output.values() if kind.name != "ec" else [each.values() for each in output.values()]
    sum(part.sum() * 0 for part in parts).backward()


def train_and_evaluate(rank: int, kind: models.Kind) -> None:
    model = decaying(kind)
    ids = models.make_ids(kind, rank, 6)
    for trained in range(10):
        plain = models.shard(kind, "table_wise", kind.bls_sharder(BLSConfig()))
        round_lookups(plain, kind, factor_at(DECAY, trained))
        wanted = forward(plain, ids)
        for _ in range(2):  # evaluations, which do not count
            models.assert_same_bits(forward(model, ids), wanted)
        model.eval()
        model(models.Batch(ids)).wait()
        model.train()
        if trained in (3, 7):  # goes on from a checkpoint
            state = model.state_dict()
            model = decaying(kind)
            model.load_state_dict(state)
            models.assert_same_bits(forward(model, ids), wanted)
        step(model, kind, 10 * trained + rank)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_bounds_decay_with_the_training_and_its_checkpoints(kind: str) -> None:
    run(2, train_and_evaluate, KINDS[kind])


def be_at_another_iteration(rank: int) -> None:
    model = decaying(models.EBC)
    forward(model, models.make_ids(models.EBC, rank, 4))
    embeddings_of(model)._bls.iterations = 100 * rank
    for _ in range(3):
        forward(model, models.make_ids(models.EBC, rank, 4))


def test_ranks_at_other_iterations_are_told_so() -> None:
    for outcome in run_outcomes(2, be_at_another_iteration):
        assert outcome.error in ("ProtocolError", "PoisonedError"), outcome
        assert "other error bounds: give all ranks the same bounds and the same" in outcome.message


def have_another_bound(rank: int) -> None:
    config = BLSConfig(codecs=CodecConfig(forward=ErrorBound(0.01 + rank)), deadline=20)
    model = models.shard(models.EBC, "table_wise", models.EBC.bls_sharder(config))
    forward(model, models.make_ids(models.EBC, rank, 4))


def test_ranks_with_other_bounds_are_told_so() -> None:
    for outcome in run_outcomes(2, have_another_bound):
        assert outcome.error == "RendezvousError", outcome
        assert "codecs of table 0" in outcome.message
        assert "ErrorBound(bound=0.01, decay=None," in outcome.message


def learn_from_nothing(rank: int) -> None:
    config = BLSConfig(codecs=CodecConfig(forward=ErrorBound(0.01)))
    model = models.shard(models.EBC, "table_wise", models.EBC.bls_sharder(config))
    for _, _, shard in models.local_shards(model).values():
        shard.mul_(1e-4)  # all of it quantizes to zero
    generator = torch.Generator().manual_seed(rank)
    for number in range(40):
        ids = models.make_ids(models.EBC, 100 * number + rank, 200, most_ids=20)
        values = models.arrived(model(models.Batch(ids))).values()
        (values * torch.randn(values.shape, generator=generator)).sum().backward()
    channels = embeddings_of(model).channels()
    assert any(name.endswith(".embeddings") for name in channels)
    for channel in channels.values():
        assert channel.stats().pulled_messages == 0, channel.name


def test_no_message_outgrows_slots_made_for_a_model_that_knows_nothing() -> None:
    run(2, learn_from_nothing)


def test_gradients_have_no_bounds() -> None:
    with pytest.raises(ValueError, match="the backward codec is an ErrorBound, but gradients"):
        CodecConfig(backward=ErrorBound(0.01))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the backward codec of table 't' is an ErrorBound"):
        CodecConfig(backward={"t": ErrorBound(0.01)})  # type: ignore[dict-item]


def test_torchrecs_own_sharders_have_none() -> None:
    with pytest.raises(ValueError, match="TorchRec needs the size of a message before it is enc"):
        codecs_registry(ErrorBound(0.01), Codec.FP32, 8)  # type: ignore[arg-type]
