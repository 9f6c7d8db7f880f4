"""Rows of equal ids travel once, and their gradients as sums."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.distributed import models
from tests.distributed.outputs.test_codecs import CODECS
from tests.distributed.results.test_exactness import batches_of, forward, piped_outputs
from tests.distributed.results.test_training import OPTIMIZERS, loss_of, state_of
from tests.processes import run, run_outcomes
from tests.tiers import slow_but, slow_where
from torchrec_bls import BLSConfig, CodecConfig, ErrorBound
from torchrec_bls.distributed.codec_config import describe, unique_of

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
NODES = {2: 2, 3: 1, 4: 2}
BOUNDED = {table: ErrorBound(0.01) for table in CODECS}


def model_with(kind: models.Kind, nodes: int, **codecs: Any) -> Any:
    config = BLSConfig(codecs=CodecConfig(**codecs), deadline=20)
    return models.shard(kind, "mixed", kind.bls_sharder(config), nodes)


def compare_forward(rank: int, world_size: int, kind: models.Kind) -> None:
    nodes = NODES[world_size]
    models.set_nodes(nodes)
    # TorchRec cannot look up batches without samples, unlike the exchange.
    batches = [ids for ids in batches_of(kind, rank) if ids.stride() > 0 or kind.name == "ec"]
    # The last one has few rows and many ids: most bags are equal to another one.
    batches = [*batches[:3], batches[-1], models.make_ids(kind, rank + 7, 300, most_ids=2)]
    plain = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig()), nodes)
    for codecs in ("fp32", CODECS, BOUNDED):
        every_row = plain if codecs == "fp32" else model_with(kind, nodes, forward=codecs)
        once = model_with(kind, nodes, forward=codecs, unique=True)
        for ids in batches:
            models.assert_same_bits(forward(once, ids), forward(every_row, ids))
    some = {table: table in ("t0", "t3", "t4") for table in CODECS}
    config = BLSConfig(bound=2, codecs=CodecConfig(unique=some))
    for ids, output in zip(
        batches, piped_outputs(kind, "mixed", nodes, config, batches), strict=True
    ):
        models.assert_same_bits(output, forward(plain, ids))


@pytest.mark.parametrize("world_size", slow_where(lambda ranks: ranks != 2, NODES))
@pytest.mark.parametrize("kind", slow_but(["ebc", "ec"], KINDS))
def test_embeddings_are_those_of_rows_that_all_travel(kind: str, world_size: int) -> None:
    run(world_size, compare_forward, world_size, KINDS[kind])


def compare_training(rank: int, world_size: int, kind: models.Kind, optimizer: str) -> None:
    nodes = NODES[world_size]
    models.set_nodes(nodes)
    fused = OPTIMIZERS[optimizer]
    states = []
    for config in (BLSConfig(), BLSConfig(codecs=CodecConfig(unique=True))):
        model = models.shard(kind, "mixed", kind.bls_sharder(config, fused), nodes)
        before = state_of(model)
        for step in range(5):
            ids = models.make_ids(kind, 100 * rank + step, 30 + rank, most_ids=2)
            loss_of(models.arrived(model(models.Batch(ids)))).backward()
        states.append(state_of(model))
    for name, wanted in states[0].items():
        change = (wanted - before[name]).norm() if wanted.numel() else 0
        assert (states[1][name] - wanted).norm() <= 1e-6 * change, name


@pytest.mark.parametrize("world_size", slow_where(lambda ranks: ranks != 2, NODES))
@pytest.mark.parametrize("kind", slow_but(["ebc", "ec"], KINDS))
def test_training_differs_by_the_rounding_of_sums(kind: str, world_size: int) -> None:
    optimizers = ["rowwise-adagrad"] if world_size > 2 else list(OPTIMIZERS)
    for optimizer in optimizers:
        run(world_size, compare_training, world_size, KINDS[kind], optimizer)


def bytes_sent(kind: models.Kind, unique: bool, ids: Any) -> dict[str, int]:
    """Returns the bytes of a step's largest messages of embeddings and gradients."""
    config = BLSConfig(codecs=CodecConfig(unique=unique, forward="fp32", backward="fp32"))
    model = models.shard(kind, "table_wise", kind.bls_sharder(config))
    loss_of(models.arrived(model(models.Batch(ids)))).backward()
    (embeddings,) = model.module.children()
    return {
        name.rpartition(".")[2]: channel.stats().largest_message
        for name, channel in embeddings.channels().items()
    }


def one_id_each(kind: models.Kind, values: torch.Tensor) -> KeyedJaggedTensor:
    features = kind.features
    lengths = torch.ones(len(features) * len(values), dtype=torch.int32)
    return KeyedJaggedTensor(features, values.repeat(len(features)), None, lengths)


def send_the_same_ids(rank: int, kind: models.Kind) -> tuple[dict[str, int], dict[str, int]]:
    ids = one_id_each(kind, torch.full((64,), 5))
    return bytes_sent(kind, False, ids), bytes_sent(kind, True, ids)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_equal_rows_take_no_bytes(kind: str) -> None:
    for every_row, once in run(2, send_the_same_ids, KINDS[kind]):
        assert once["ids"] == every_row["ids"]
        for direction in ("embeddings", "gradients"):
            assert once[direction] < every_row[direction] / 20, direction


def change_rows_in_a_hook(rank: int) -> None:
    model = model_with(models.EBC, 1, unique=True)
    (embeddings,) = model.module.children()
    embeddings._lookups[0].register_forward_hook(lambda *_: None)
    forward(model, models.make_ids(models.EBC, rank, 4))


def test_hooks_of_lookups_are_refused() -> None:
    for outcome in run_outcomes(2, change_rows_in_a_hook):
        assert outcome.error in ("ValueError", "PoisonedError"), outcome
        assert "a hook of its lookups may give equal ids different rows" in outcome.message


def differ_in_unique(rank: int) -> None:
    model = model_with(models.EBC, 1, unique=rank == 0)
    forward(model, models.make_ids(models.EBC, rank, 4))


def test_ranks_of_which_one_sends_every_row_are_told_so() -> None:
    for outcome in run_outcomes(2, differ_in_unique):
        assert outcome.error == "RendezvousError", outcome
        assert "codecs of table 0" in outcome.message
        assert "equal rows once" in outcome.message


def give_weights_to_a_module_without(rank: int) -> None:
    plain = models.shard(models.EBC, "table_wise", models.EBC.bls_sharder(BLSConfig()))
    once = models.shard(
        models.EBC,
        "table_wise",
        models.EBC.bls_sharder(BLSConfig(codecs=CodecConfig(unique=True))),
    )
    ids = one_id_each(models.EBC, torch.arange(30) // 3)
    weights = torch.arange(len(ids.values()), dtype=torch.float32)
    weighted = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
    models.assert_same_bits(forward(once, weighted), forward(plain, weighted))


def test_rows_of_equal_ids_with_other_weights_all_travel() -> None:
    run(2, give_weights_to_a_module_without)


def find_other_groups(rank: int) -> None:
    model = model_with(models.EBC, 1, unique=True)
    (embeddings,) = model.module.children()
    ids = one_id_each(models.EBC, torch.full((20,), 3))
    forward(model, ids)
    for input_dist in embeddings._input_dists:
        found = input_dist._dist._unique
        if rank == 0:  # as if its ids had changed when they were posted
            input_dist._dist._unique = SimpleNamespace(
                received=found.received,
                sent=lambda lengths, values, *rest, found=found: found.sent(
                    lengths, torch.arange(len(values)) % 2, *rest
                ),
            )
    forward(model, ids)


def test_ranks_that_find_other_rows_equal_are_told_so() -> None:
    first, second = run_outcomes(2, find_other_groups)
    assert first.error == "ProtocolError", first
    assert "was made with other groups of equal rows: the ids that the rows" in first.message
    assert second.error in (None, "PoisonedError"), second  # it may be done by then


def test_an_answer_is_needed_for_every_table() -> None:
    config = CodecConfig(unique={"t0": True})
    assert unique_of(config, "t0")
    with pytest.raises(ValueError, match="unique says nothing of table 't1'"):
        describe(config, "t1")
    with pytest.raises(ValueError, match="unique is 'yes', but must be True or False"):
        CodecConfig(unique="yes")  # type: ignore[arg-type]
