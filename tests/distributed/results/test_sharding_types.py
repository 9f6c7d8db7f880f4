"""Sharding types that only EmbeddingBagCollections have give TorchRec's results."""

import warnings

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from tests.distributed.results.rank_order import in_rank_order
from tests.distributed.results.test_exactness import with_a_sample, without_samples
from tests.distributed.results.test_training import loss_of
from tests.processes import run
from tests.tiers import slow_but, slow_where
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
    CodecConfig,
)

NODES = {2: 2, 4: 2}
KINDS = {kind.name: kind for kind in (models.EBC, models.WEIGHTED)}
# Tables 1 and 3 of EBC have mean pooling, which TorchRec gets wrong in a grid.
MIXES = {
    "grid": ["grid_shard", "table_wise", "grid_shard", "column_wise", "grid_shard"],
    "table-column-wise": ["table_column_wise"] * 5,
    "replicas": ["data_parallel"] * 5,
    "replicas beside others": [
        "data_parallel",
        "row_wise",
        "table_wise",
        "data_parallel",
        "table_wise",
    ],
    "everything": ["grid_shard", "data_parallel", "table_column_wise", "column_wise", "row_wise"],
}
BOUNDS = (0, 2)
STEPS = 4


def shard_by(kind: models.Kind, mix: str, sharder: object) -> DistributedModelParallel:
    module, nodes = kind.module(), NODES[torch.distributed.get_world_size()]
    models.set_nodes(nodes)
    plan = models.make_plan(module, MIXES[mix], sharder, nodes)
    return models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])


def compare_outputs(rank: int, kind: models.Kind, mix: str) -> None:
    batches = [models.make_ids(kind, 10 * rank + i, 3 + rank + i) for i in range(3)]
    batches.append(models.make_ids(kind, rank, 0 if rank else 4))
    batches.append(models.make_ids(kind, rank, 2, dtype=torch.int32))
    theirs = shard_by(kind, mix, kind.torchrec_sharder())
    with torch.no_grad(), in_rank_order():
        expected = [
            models.flatten(theirs(models.Batch(with_a_sample(kind, ids)))) for ids in batches
        ]
    expected = [
        out if ids.stride() else without_samples(out)
        for out, ids in zip(expected, batches, strict=True)
    ]
    for bound in BOUNDS:
        ours = shard_by(kind, mix, kind.bls_sharder(BLSConfig(bound=bound)))
        with torch.no_grad():
            for ids, wanted in zip(batches, expected, strict=True):
                models.assert_same_bits(models.flatten(ours(models.Batch(ids))), wanted)
        pipeline = BoundedLagPipeline[models.Batch, object](ours)
        loader = iter([models.Batch(ids) for ids in batches])
        for wanted in expected:
            models.assert_same_bits(models.flatten(pipeline.progress(loader)), wanted)


def train(
    model: DistributedModelParallel, kind: models.Kind, rank: int, empty: int
) -> dict[str, torch.Tensor]:
    """Returns the outputs and the weights at the end; replicas are trained by plain SGD.

    Args:
        empty: samples of the batch without ids that rank 1 has in the last but one step.
    """
    results = {}
    parameters = dict(model.named_parameters())
    of_replicas = [parameters[name] for name in models.replicas(model)]
    optimizer = torch.optim.SGD(of_replicas, lr=0.1) if of_replicas else None
    for step in range(STEPS):
        without_ids = rank == 1 and step == STEPS - 2
        ids = models.make_ids(kind, 10 * rank + step, 5)
        if without_ids:
            ids = models.make_ids(kind, 0, empty, most_ids=0)
        output = models.arrived(model(models.Batch(ids)))
        loss_of(output).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if not without_ids:
            results |= {f"{step} {name}": value for name, value in models.flatten(output).items()}
    results |= {name: shard.clone() for name, (_, _, shard) in models.local_shards(model).items()}
    return results | {name: table.clone() for name, table in models.replicas(model).items()}


def compare_training(rank: int, kind: models.Kind, mix: str) -> None:
    theirs = shard_by(kind, mix, kind.torchrec_sharder())
    before = {name: table.clone() for name, table in models.replicas(theirs).items()}
    with in_rank_order():
        expected = train(theirs, kind, rank, empty=1)
    ours = shard_by(kind, mix, kind.bls_sharder(BLSConfig()))
    trained = train(ours, kind, rank, empty=0)
    models.assert_same_bits(trained, expected)
    assert all(not torch.equal(trained[name], table) for name, table in before.items())


def compare(rank: int, kind: models.Kind) -> None:
    for mix in MIXES:
        try:
            compare_outputs(rank, kind, mix)
            compare_training(rank, kind, mix)
        except AssertionError as error:
            raise AssertionError(f"{mix}: {error}") from error


@pytest.mark.parametrize("world_size", slow_where(lambda ranks: ranks == 2, NODES))
@pytest.mark.parametrize("kind", slow_but(["ebc"], KINDS))
def test_outputs_and_training_are_torchrecs(kind: str, world_size: int) -> None:
    run(world_size, compare, KINDS[kind], deadline=120)


def shard_means_as_a_grid(rank: int) -> None:
    models.set_nodes(2)
    sharder = models.EBC.bls_sharder(BLSConfig())
    plan = models.make_plan(
        models.EBC.module(), ["table_wise"] * 3 + ["grid_shard"] * 2, sharder, 2
    )
    message = "table 't3' has mean pooling and is planned with sharding type grid_shard, for which"
    with pytest.raises(ValueError, match=message):
        models.shard_model(models.EBC.module(), {"": plan}, [sharder])


def test_mean_pooling_in_a_grid_is_refused() -> None:
    run(2, shard_means_as_a_grid)


def shard_means_by_rows(rank: int) -> None:
    sharder = models.EBC.bls_sharder(BLSConfig())
    for types, wrong in (
        (["table_wise", "row_wise", "table_wise", "table_wise", "column_wise"], True),
        (["row_wise"] * 5, False),
        (["row_wise", "table_wise", "row_wise", "column_wise", "row_wise"], False),
    ):
        plan = models.make_plan(models.EBC.module(), types, sharder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = models.shard_model(
                models.SparseOnly(models.EBC.module()), {"embeddings": plan}, [sharder]
            )
        told = [str(each.message) for each in caught if "mean pooling" in str(each.message)]
        ids = models.make_ids(models.EBC, rank, 5)
        with torch.no_grad():
            ours, expected = (
                models.arrived(model(models.Batch(ids))).to_dict(),
                models.EBC.module()(ids).to_dict(),
            )
        right = all(torch.allclose(ours[name], expected[name]) for name in expected)
        assert right != wrong, types
        assert len(told) == (wrong and rank == 0)
        if told:
            assert "tables ['t1'] have mean pooling and are sharded by rows, and ['t0', " in told[0]


def test_what_torchrec_divides_too_often_is_warned_about() -> None:
    run(2, shard_means_by_rows)


def pool_a_feature_in_both_ways(rank: int, weighted: bool) -> None:
    """The mean's table comes first or last, alone or beside one sharded by columns."""
    models.set_nodes(1)
    sum_, mean = PoolingType.SUM, PoolingType.MEAN
    for poolings, types in (
        ([mean, sum_], ["row_wise"] * 2),
        ([sum_, mean], ["row_wise"] * 2),
        ([mean, sum_, mean], ["row_wise"] * 3),
        ([mean, sum_], ["row_wise", "table_row_wise"]),
    ):
        tables = [
            EmbeddingBagConfig(
                num_embeddings=9,
                embedding_dim=8,
                name=f"t{i}",
                feature_names=["f", f"own{i}"],
                pooling=pooling,
            )
            for i, pooling in enumerate(poolings)
        ]
        torch.manual_seed(0)
        module = EmbeddingBagCollection(tables=tables, is_weighted=weighted)
        keys = ["f", *(f"own{i}" for i in range(len(tables)))]
        draw = torch.Generator().manual_seed(rank)
        lengths = torch.randint(5, (len(keys) * 6,), generator=draw, dtype=torch.int32)
        ids = torch.randint(9, (int(lengths.sum()),), generator=draw)
        bag_weights = torch.rand(len(ids), generator=draw) if weighted else None
        batch = KeyedJaggedTensor(keys, ids, bag_weights, lengths)
        expected = pooled_by_hand(module, batch)
        for config in (BLSConfig(), BLSConfig(lookup="direct")):
            sharder = BLSEmbeddingBagCollectionSharder(config=config)
            plan = models.make_plan(module, types, sharder)
            model = models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
            with torch.no_grad():
                ours = models.arrived(model(models.Batch(batch))).to_dict()
            assert ours.keys() == expected.keys()
            for name, wanted in expected.items():
                close = torch.allclose(ours[name], wanted, rtol=1e-4, atol=1e-5)
                assert close, f"{name} of {poolings} by {types}, {config.lookup}"


def pooled_by_hand(
    module: EmbeddingBagCollection, batch: KeyedJaggedTensor
) -> dict[str, torch.Tensor]:
    expected = {}
    for table in module.embedding_bag_configs():
        weight = module.embedding_bags[table.name].weight.detach()
        for feature in table.feature_names:
            bags = batch[feature]
            of_ids = (
                torch.ones(len(bags.values())) if bags.weights_or_none() is None else bags.weights()
            )
            samples = torch.arange(batch.stride()).repeat_interleave(bags.lengths())
            rows = weight[bags.values()] * of_ids[:, None]
            sums = torch.zeros(batch.stride(), weight.shape[1]).index_add(0, samples, rows)
            if table.pooling == PoolingType.MEAN:
                sums /= torch.zeros(batch.stride()).index_add(0, samples, of_ids)[:, None] + 1e-6
            expected[f"f@{table.name}" if feature == "f" else feature] = sums
    return expected


@pytest.mark.parametrize("weighted", [False, True])
def test_a_feature_is_right_in_tables_of_both_poolings(weighted: bool) -> None:
    """Sums and means by hand are the reference: TorchRec's sharded module gets these wrong."""
    run(2, pool_a_feature_in_both_ways, weighted)


def warn_of_the_difference(rank: int) -> None:
    told = []
    for poolings in ([PoolingType.MEAN, PoolingType.SUM], [PoolingType.SUM, PoolingType.MEAN]):
        tables = [
            EmbeddingBagConfig(
                num_embeddings=9, embedding_dim=4, name=f"t{i}", feature_names=["f"], pooling=each
            )
            for i, each in enumerate(poolings)
        ]
        module = EmbeddingBagCollection(tables=tables)
        sharder = BLSEmbeddingBagCollectionSharder(config=BLSConfig())
        plan = models.make_plan(module, ["row_wise"] * 2, sharder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
        told.append([str(each.message) for each in caught if "pooling" in str(each.message)])
    assert [len(each) for each in told] == [1 - rank, 0]
    if rank == 0:
        assert (
            "leaves the means ['f@t0'] undivided there, and divides the sums ['f@t1']" in told[0][0]
        )


def test_results_other_than_torchrecs_are_warned_about() -> None:
    run(2, warn_of_the_difference)


def encode_beside_replicas(rank: int) -> None:
    """Rows of replicas do not travel, so that no codec touches them."""
    config = BLSConfig(codecs=CodecConfig(forward="uint2"))
    coded = shard_by(models.EBC, "replicas beside others", models.EBC.bls_sharder(config))
    plain = shard_by(models.EBC, "replicas beside others", models.EBC.bls_sharder(BLSConfig()))
    ids = models.make_ids(models.EBC, rank, 4)
    with torch.no_grad():
        ours, exact = (
            models.arrived(coded(models.Batch(ids))),
            models.arrived(plain(models.Batch(ids))),
        )
    for feature, replicated in (("f0", True), ("f3", True), ("f1", False), ("f4", False)):
        name = feature if feature in ours.keys() else f"{feature}@t{feature[1]}"  # noqa: SIM118
        assert torch.equal(ours[name], exact[name]) == replicated, name


def test_codecs_leave_replicas_alone() -> None:
    run(2, encode_beside_replicas)
