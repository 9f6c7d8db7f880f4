"""Lookups without gradients: rows go from the tables into the messages, or do not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_configs import DataType

from tests.distributed.models import (
    EBC,
    EC,
    SGD,
    WEIGHTED,
    Batch,
    Kind,
    SparseOnly,
    assert_same_bits,
    flatten,
    local_shards,
    make_ids,
    make_plan,
    shard,
    shard_model,
)
from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, _native

SHARDINGS = ["table_wise", "row_wise"]


@contextmanager
def lookups_counted() -> Iterator[list[int]]:
    """Counts the calls of FBGEMM's lookup."""
    calls = [0]
    theirs = SplitTableBatchedEmbeddingBagsCodegen.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        looked_up: torch.Tensor = theirs(self, *args, **kwargs)
        return looked_up

    with patch.object(SplitTableBatchedEmbeddingBagsCodegen, "forward", counted):
        yield calls


def two_forwards(model: Any, rank: int, kind: Kind = EC) -> dict[str, torch.Tensor]:
    """Returns the outputs of a second batch: the first one may go TorchRec's way."""
    model(Batch(make_ids(kind, rank, 2)))
    with lookups_counted() as calls:
        output = flatten(model(Batch(make_ids(kind, rank + 10, 5))))
    return output | {"lookups": torch.tensor(calls[0])}


def ours_and_theirs(
    sharding: str, change: Callable[[Any], object] = lambda model: None
) -> tuple[Any, Any]:
    models = [
        shard(EC, sharding, sharder)
        for sharder in (EC.bls_sharder(BLSConfig()), EC.torchrec_sharder())
    ]
    for model in models:
        change(model)
    return models[0], models[1]


def compare(rank: int, sharding: str) -> int:
    ours, theirs = ours_and_theirs(sharding)
    with torch.no_grad():
        mine, expected = two_forwards(ours, rank), two_forwards(theirs, rank)
    assert expected.pop("lookups") == 1
    lookups = int(mine.pop("lookups"))
    assert_same_bits(mine, expected)
    return lookups


@pytest.mark.parametrize("sharding", slow_but(["row_wise"], SHARDINGS))
def test_tables_are_read_in_place(sharding: str) -> None:
    assert run(3, compare, sharding) == [0, 0, 0]


def pooled_lookups(rank: int, pooling: PoolingType, weighted: bool) -> int:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            num_embeddings=100, embedding_dim=8, name=f"t{i}", feature_names=[f], pooling=pooling
        )
        for i, f in enumerate(EBC.features)
    ]
    module = EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    outputs = []
    for sharder in (EBC.torchrec_sharder(), EBC.bls_sharder(BLSConfig())):
        plan = make_plan(module, ["table_wise"] * len(tables), sharder)
        model = shard_model(SparseOnly(module), {"embeddings": plan}, [sharder])
        with torch.no_grad():
            outputs.append(two_forwards(model, rank, WEIGHTED if weighted else EBC))
    theirs, ours = outputs
    theirs.pop("lookups")
    lookups = int(ours.pop("lookups"))
    assert_same_bits(ours, theirs)
    return lookups


@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(PoolingType.SUM, False), (PoolingType.SUM, True), (PoolingType.MEAN, False)],
)
def test_bags_are_pooled_by_the_exchange(pooling: PoolingType, weighted: bool) -> None:
    assert run(2, pooled_lookups, pooling, weighted) == [0, 0]


def compare_with_gradients(rank: int, sharding: str) -> int:
    ours, theirs = ours_and_theirs(sharding)
    mine, expected = two_forwards(ours, rank), two_forwards(theirs, rank)
    lookups = int(mine.pop("lookups"))
    expected.pop("lookups")
    assert_same_bits(mine, expected)
    return lookups


@pytest.mark.parametrize("sharding", slow_but(["row_wise"], SHARDINGS))
def test_gradients_need_fbgemms_lookup(sharding: str) -> None:
    assert run(2, compare_with_gradients, sharding) == [1, 1]


def double_the_rows(model: Any) -> None:
    for lookup in model.module.embeddings._lookups:
        for kernel in lookup._emb_modules:
            kernel.emb_module.register_forward_hook(lambda module, inputs, output: 2 * output)


def compare_with_hooks(rank: int) -> int:
    ours, theirs = ours_and_theirs("table_wise", double_the_rows)
    with torch.no_grad():
        mine, expected = two_forwards(ours, rank), two_forwards(theirs, rank)
    lookups = int(mine.pop("lookups"))
    expected.pop("lookups")
    assert_same_bits(mine, expected)
    return lookups


def test_a_hooked_lookup_is_called() -> None:
    assert run(2, compare_with_hooks) == [1, 1]


def weights_that_change(rank: int, sharding: str) -> None:
    model = shard(EC, sharding, EC.bls_sharder(BLSConfig()))
    with torch.no_grad():
        before = two_forwards(model, rank)
        for _, _, weights in local_shards(model).values():
            weights.mul_(2)
        after = two_forwards(model, rank)
    for name, tensor in before.items():
        if name.endswith(" values"):
            assert torch.equal(after[name], 2 * tensor)


@pytest.mark.parametrize("sharding", slow_but(["table_wise"], SHARDINGS))
def test_changed_weights_are_seen(sharding: str) -> None:
    run(2, weights_that_change, sharding)


def half_precision(rank: int, output_dtype: str) -> tuple[int, str]:
    tables = [
        EmbeddingConfig(
            num_embeddings=100,
            embedding_dim=8,
            name=f"t{i}",
            feature_names=[feature],
            data_type=DataType.FP16,
        )
        for i, feature in enumerate(EC.features)
    ]
    torch.manual_seed(0)
    module = EmbeddingCollection(tables=tables)
    params = SGD | {"output_dtype": SparseType.from_dtype(getattr(torch, output_dtype))}
    outputs = []
    for sharder in (EC.torchrec_sharder(dict(params)), EC.bls_sharder(BLSConfig(), dict(params))):
        plan = make_plan(module, ["table_wise"] * len(tables), sharder)
        model = shard_model(SparseOnly(module), {"embeddings": plan}, [sharder])
        with torch.no_grad():
            outputs.append(two_forwards(model, rank))
    theirs, ours = outputs
    theirs.pop("lookups")
    lookups = int(ours.pop("lookups"))
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name])
    return lookups, str(ours["f0 values"].dtype)


@pytest.mark.parametrize(("output_dtype", "lookups"), [("float32", 1), ("float16", 0)])
def test_rows_that_are_converted_are_looked_up(output_dtype: str, lookups: int) -> None:
    assert run(2, half_precision, output_dtype) == [(lookups, f"torch.{output_dtype}")] * 2


def a_row_that_is_not_there(rank: int) -> None:
    model = shard(EC, "table_wise", EC.bls_sharder(BLSConfig(deadline=20)))
    with torch.no_grad():
        two_forwards(model, rank)
        if rank == 0:  # as if rank 1 asked for more than the table has
            module: Any = model.module.embeddings
            tables = module._bls.lookup_tables[0]
            kernel = tables._kernels[0]
            nothing = kernel.split_embedding_weights()[0][:0]
            features = len(kernel._feature_table_map)
            tables._by_feature = _native.Tables([(nothing, False)] * features)
        model(Batch(make_ids(EC, rank, 5)))["f0"]


def test_a_row_that_a_table_does_not_have() -> None:
    holder, other = run_outcomes(2, a_row_that_is_not_there)
    assert holder.error == "ValueError" and "whose table has 0 rows here" in holder.message
    assert other.error == "PoisonedError" and "whose table has 0 rows here" in other.message
