"""Batch sizes per key: embeddings and gradients are those of the batch with each sample in full.

TorchRec's EmbeddingCollection is a reference of embeddings. Of gradients it is none: its reindexing
has none on CPU. Its EmbeddingBagCollection cannot do batch sizes per key on CPU at all
("pre-allocated vbe_output is not supported on CPU"). Both get whole samples there.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from tests.distributed.results.rank_order import in_rank_order
from tests.distributed.results.test_training import loss_of
from tests.processes import run
from tests.tiers import slow_but, slow_where
from torchrec_bls import BLSConfig, BLSEmbeddingCollectionSharder, BoundedLagPipeline
from torchrec_bls.distributed.codec_config import CodecConfig

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
NODES = {2: 2, 4: 2}


def make_variable(
    kind: models.Kind, seed: int, strides: Sequence[int], samples: int
) -> KeyedJaggedTensor:
    """Draws ids for `strides` rows of each key, and a row of each key for each of `samples`."""
    generator = torch.Generator().manual_seed(seed)
    whole = models.make_ids(kind, seed, max(strides))
    parts = [
        [tensor for row in range(stride) for tensor in [jagged.values()[_span(jagged, row)]]]
        for jagged, stride in zip(whole.to_dict().values(), strides, strict=True)
    ]
    weights = [
        jagged.weights()[_span(jagged, row)]
        for jagged, stride in zip(whole.to_dict().values(), strides, strict=True)
        for row in range(stride)
        if kind.name == "weighted"
    ]
    rows = [torch.randint(stride, (samples,), generator=generator) for stride in strides]
    return KeyedJaggedTensor(
        keys=kind.features,
        values=torch.cat([ids for of_key in parts for ids in of_key]),
        weights=torch.cat(weights) if weights else None,
        lengths=torch.tensor([len(ids) for of_key in parts for ids in of_key], dtype=torch.int32),
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(list(kind.features), torch.stack(rows)),
    )


def _span(jagged: Any, row: int) -> slice:
    first, end = jagged.offsets()[row : row + 2].tolist()
    return slice(first, end)


def in_full(kind: models.Kind, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the batch with the ids of each sample under each key."""
    first, values, weights, lengths = 0, [], [], []
    spans = torch.cat([torch.zeros(1, dtype=torch.int64), ids.lengths().cumsum(0)]).tolist()
    for stride, rows in zip(ids.stride_per_key(), ids.inverse_indices()[1].tolist(), strict=True):
        for row in rows:
            span = slice(spans[first + row], spans[first + row + 1])
            values.append(ids.values()[span])
            lengths.append(span.stop - span.start)
            if kind.name == "weighted":
                weights.append(ids.weights()[span])
        first += stride
    return KeyedJaggedTensor(
        kind.features,
        torch.cat(values),
        torch.cat(weights) if weights else None,
        torch.tensor(lengths, dtype=torch.int32),
    )


def batches_of(kind: models.Kind, rank: int) -> list[KeyedJaggedTensor]:
    return [
        make_variable(kind, 10 * rank, [3, 1, 4, 2, 2 + rank], 5),
        make_variable(kind, 10 * rank + 1, [2, 2, 2, 2, 1], 3 + rank),
        make_variable(kind, 10 * rank + 2, [1, 6, 1, 3, 2], 9),
    ]


def train(
    model: DistributedModelParallel, batches: Sequence[KeyedJaggedTensor]
) -> dict[str, torch.Tensor]:
    results = {}
    for step, ids in enumerate(batches):
        output = models.arrived(model(models.Batch(ids)))
        loss_of(output).backward()
        results |= {f"{step} {name}": value for name, value in models.flatten(output).items()}
    return results | {
        name: table.clone() for name, (_, _, table) in models.local_shards(model).items()
    }


# Row-wise mean pooling takes the divisors of TorchRec's own input dist.
SHARDINGS = ["table_wise", "row_wise", "column_wise", "mixed"]


def compare(rank: int, kind: models.Kind, sharding: str) -> None:
    world_size = torch.distributed.get_world_size()
    models.set_nodes(NODES[world_size])
    batches = batches_of(kind, rank)
    full = [in_full(kind, ids) for ids in batches]
    same = batches if kind.name == "ec" else full
    theirs = models.shard(kind, sharding, kind.torchrec_sharder(), NODES[world_size])
    ours = models.shard(kind, sharding, kind.bls_sharder(BLSConfig()), NODES[world_size])
    with torch.no_grad(), in_rank_order():
        expected = [models.flatten(theirs(models.Batch(ids))) for ids in same]
        for ids, wanted in zip(batches, expected, strict=True):
            models.assert_same_bits(models.flatten(ours(models.Batch(ids))), wanted)
    with in_rank_order():
        trained = train(theirs, full)
    # The gradients of samples with the same row are added up before they travel.
    for name, tensor in train(ours, batches).items():
        torch.testing.assert_close(tensor, trained[name], rtol=1e-5, atol=1e-6)


def read_directly(rank: int, kind: models.Kind) -> None:
    """Outputs are those of TorchRec's own modules, for the batch with each sample in full."""
    batches = batches_of(kind, rank)
    theirs = models.shard(kind, "row_wise", kind.torchrec_sharder())
    config = BLSConfig(lookup="direct")
    ours = models.shard(kind, "row_wise", kind.bls_sharder(config))
    with torch.no_grad(), in_rank_order():
        for ids in batches:
            wanted = models.flatten(theirs(models.Batch(in_full(kind, ids))))
            models.assert_same_bits(models.flatten(ours(models.Batch(ids))), wanted)
        nothing = make_variable(kind, rank, [1, 2, 1, 1, 1], 0)
        assert all(len(each) == 0 for each in models.flatten(ours(models.Batch(nothing))).values())


@pytest.mark.parametrize("kind", KINDS)
def test_direct_reads(kind: str) -> None:
    run(2, read_directly, KINDS[kind])


def train_on_equal_samples(rank: int, sharding: str, codecs: CodecConfig | None) -> None:
    """Each rank's two samples have the same row, with ids 1 and 2 on rank 0 and id 2 on rank 1."""
    module = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                num_embeddings=4, embedding_dim=4, name=f"t{i}", feature_names=[f"f{i}"]
            )
            for i in range(2)
        ]
    )
    sharder = BLSEmbeddingCollectionSharder({"learning_rate": 1.0}, config=BLSConfig(codecs=codecs))
    plan = models.make_plan(module, [sharding] * 2, sharder)
    model = models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
    before = models.local_shards(model)
    before = {name: shard.clone() for name, (_, _, shard) in before.items()}
    ids = [2] if rank else [1, 2]
    batch = KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.tensor([*ids, *ids]),
        lengths=torch.tensor([len(ids), len(ids), 0], dtype=torch.int32),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["f0", "f1"], torch.tensor([[0, 0], [0, 1]])),
    )
    output = models.arrived(model(models.Batch(batch)))
    assert output["f0"].lengths().tolist() == [len(ids)] * 2
    (3 * output["f0"].values().sum() + 5 * output["f1"].values().sum()).backward()
    # By hand: two samples choose each id of f0, one each id of f1; TorchRec divides by the ranks.
    gradients = {"t0": [0.0, 3.0, 6.0, 0.0], "t1": [0.0, 2.5, 5.0, 0.0]}
    for name, (rows, _, shard) in models.local_shards(model).items():
        wanted = torch.tensor(gradients[name.split(".")[-2]])[rows, None].expand(shard.shape)
        torch.testing.assert_close(before[name] - shard, wanted)


@pytest.mark.parametrize("codecs", [None, CodecConfig(unique=True)], ids=["plain", "unique"])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_an_embedding_collection_trains(sharding: str, codecs: CodecConfig | None) -> None:
    run(2, train_on_equal_samples, sharding, codecs)


def compare_all(rank: int, kind: models.Kind) -> None:
    for sharding in SHARDINGS:
        try:
            compare(rank, kind, sharding)
        except AssertionError as error:
            raise AssertionError(f"{sharding}: {error}") from error


@pytest.mark.parametrize("world_size", slow_where(lambda ranks: ranks == 4, NODES))
@pytest.mark.parametrize("kind", slow_but(["weighted"], KINDS))
def test_outputs_and_training_are_torchrecs(kind: str, world_size: int) -> None:
    run(world_size, compare_all, KINDS[kind], deadline=120)


def go_on_with_other_batches(rank: int, kind: models.Kind) -> None:
    """Some batches vary by key, some do not, and some have no samples; on one rank or another."""
    plain = [models.make_ids(kind, 10 * rank + i, 4) for i in range(3)]
    varying = batches_of(kind, rank)
    alike = make_variable(kind, rank, [3] * 5, 4)
    empty = KeyedJaggedTensor(
        kind.features,
        torch.empty(0, dtype=torch.int64),
        torch.empty(0) if kind.name == "weighted" else None,
        lengths=torch.empty(0, dtype=torch.int32),
        stride_per_key_per_rank=[[0]] * 5,
        inverse_indices=(list(kind.features), torch.empty(5, 0, dtype=torch.int64)),
    )
    batches = [plain[0], varying[0], varying[1] if rank else plain[1], alike]
    batches += [empty if rank else varying[2], plain[2]]
    reference = models.shard(kind, "table_wise", kind.bls_sharder(BLSConfig()))
    model = models.shard(kind, "table_wise", kind.bls_sharder(BLSConfig(bound=2)))
    with torch.no_grad():
        expected = [models.flatten(reference(models.Batch(ids))) for ids in batches]
    assert kind.name == "ec" or next(iter(expected[4].values())).shape[0] == (0 if rank else 9)
    pipeline = BoundedLagPipeline[models.Batch, object](model)
    loader = iter([models.Batch(ids) for ids in batches])
    for wanted in expected:
        models.assert_same_bits(models.flatten(pipeline.progress(loader)), wanted)


@pytest.mark.parametrize("kind", slow_but(["ebc"], KINDS))
def test_they_go_among_other_batches_at_any_bound(kind: str) -> None:
    run(2, go_on_with_other_batches, KINDS[kind])


def send_rows_without_samples(rank: int, sharding: str) -> None:
    """Rank 1 has ids, but no sample that they belong to, in its first batch and in a later one."""
    kind, full = models.EC, batches_of(models.EC, rank)
    without = make_variable(kind, rank, [3, 1, 4, 2, 2], 0) if rank else full[1]
    batches = [without, full[0], without]
    reference = models.shard(kind, sharding, kind.bls_sharder(BLSConfig(name="reference")))
    with torch.no_grad():
        # With a size for all keys each output of rank 0 is the same, and rank 1 has nothing.
        nothing = KeyedJaggedTensor(
            kind.features,
            torch.empty(0, dtype=torch.int64),
            lengths=torch.empty(0, dtype=torch.int32),
            stride=0,
        )
        plain = [nothing if rank and ids is without else in_full(kind, ids) for ids in batches]
        expected = [models.flatten(reference(models.Batch(ids))) for ids in plain]
    for grad in (False, True):
        model = models.shard(kind, sharding, kind.bls_sharder(BLSConfig(name=f"grad {grad}")))
        with torch.set_grad_enabled(grad):
            for ids, wanted in zip(batches, expected, strict=True):
                output = models.arrived(model(models.Batch(ids)))
                if grad:
                    loss_of(output).backward()
                    break  # the weights are others from here on
                models.assert_same_bits(models.flatten(output), wanted)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_rows_without_samples_are_no_samples(sharding: str) -> None:
    run(2, send_rows_without_samples, sharding)


def change_the_order_of_inverse_indices(rank: int) -> None:
    model = models.shard(models.EC, "table_wise", models.EC.bls_sharder(BLSConfig()))
    first, second = batches_of(models.EC, rank)[:2]
    names, rows = second.inverse_indices()
    second._inverse_indices = (names[::-1], rows.flip(0))
    with torch.no_grad():
        models.arrived(model(models.Batch(first)))
        torch.distributed.barrier()
        with pytest.raises(ValueError, match=r"inverse_indices are given for \['f4', .*the same"):
            models.arrived(model(models.Batch(second)))


def test_inverse_indices_may_not_change_their_order() -> None:
    """TorchRec takes the rows of other keys then, without a word."""
    run(2, change_the_order_of_inverse_indices)
