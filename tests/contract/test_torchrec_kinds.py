"""What data-parallel tables, grids, batch sizes per key, wrappers and 2D count on in TorchRec."""

import inspect
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    pad_vbe_kjt_lengths,
)
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist, DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import NoWait, ShardingEnv2D, ShardingType

from tests.distributed import models
from tests.distributed.inputs.test_variable_batch import make_variable
from tests.distributed.results.test_wrappers import managed, sharded_by
from tests.processes import run


def test_names_of_sharding_types() -> None:
    assert [
        ShardingType.DATA_PARALLEL.value,
        ShardingType.TABLE_COLUMN_WISE.value,
        ShardingType.GRID_SHARD.value,
    ] == ["data_parallel", "table_column_wise", "grid_shard"]


def look_at_sharding_types(rank: int) -> None:
    models.set_nodes(2)
    types = ["grid_shard", "data_parallel", "table_column_wise", "table_wise", "table_wise"]
    module, sharder = models.EBC.module(), models.EBC.torchrec_sharder()
    plan = models.make_plan(module, types, sharder, 2)
    model = models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
    sharded = model.module.embeddings
    with torch.no_grad():
        models.arrived(model(models.Batch(models.make_ids(models.EBC, rank, 3))))
    parts = {
        kind: (sharded._input_dists[i], sharded._lookups[i], sharded._output_dists[i])
        for i, kind in enumerate(sharded._sharding_types)
    }
    input_dist, _, output_dist = parts["grid_shard"]
    assert type(input_dist) is TwRwSparseFeaturesDist
    assert input_dist._dist._stagger == 2
    assert output_dist._intra_pg.size() == output_dist._cross_pg.size() == 2
    assert output_dist._dim_sum_per_node == [4, 4]
    assert output_dist._callbacks is None
    _, _, output_dist = parts["table_column_wise"]
    assert sum(output_dist._dim_sum_per_rank) == 8
    input_dist, lookup, output_dist = parts["data_parallel"]
    assert type(input_dist) is DpSparseFeaturesDist
    assert type(output_dist) is DpPooledEmbeddingDist
    assert isinstance(lookup, DistributedDataParallel)
    assert list(lookup.module._emb_modules)
    assert lookup.modules_buffers == []  # which a forward would synchronise, in inference too
    rows = torch.ones(3)
    assert type(output_dist(rows, None)) is NoWait
    assert output_dist(rows, None).wait() is rows


def test_parts_of_sharding_types() -> None:
    run(4, look_at_sharding_types)


def vary_the_batch(rank: int) -> None:
    module, sharder = models.EC.module(), models.EC.torchrec_sharder()
    plan = models.make_plan(module, ["table_wise"] * 5, sharder)
    sharded = models.shard_model(
        models.SparseOnly(module), {"embeddings": plan}, [sharder]
    ).module.embeddings
    ids = make_variable(models.EC, rank, [3, 1, 4, 2, 2], 5)
    assert ids.variable_stride_per_key() is True
    assert ids.stride_per_key() == [3, 1, 4, 2, 2]
    names, rows = ids.inverse_indices_or_none()
    assert (names, rows.shape) == (ids.keys(), (5, 5))
    context = sharded.create_context()
    with torch.no_grad():
        sharded.input_dist(context, ids).wait().wait()
    assert [each.stride() for each in context.seq_vbe_ctx and [pad_vbe_kjt_lengths(ids)]] == [4]
    assert context.sharding_contexts[0].features_before_input_dist.stride() == 4
    assert sharded._inverse_indices_permute_per_sharding is not None


def test_batch_sizes_per_key_are_padded_before_the_input_dist() -> None:
    """And the order of the first inverse indices is kept."""
    run(2, vary_the_batch)


def test_reverse_indices_choose_rows_with_gradients() -> None:
    """And lengths are those of `input_features`, whose values nobody reads."""
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    whole = KeyedJaggedTensor(
        ["f"], torch.empty(0, dtype=torch.int64), lengths=torch.tensor([1, 2]), length_per_key=[3]
    )
    context = EmbeddingCollectionContext(
        input_features=[whole], reverse_indices=[torch.tensor([2, 0, 2])]
    )
    output = EmbeddingCollectionAwaitable([NoWait(rows)], [whole], [["f"]], context).wait()["f"]
    assert output.lengths().tolist() == [1, 2]
    assert output.values().tolist() == [[4, 5], [0, 1], [4, 5]]
    output.values().sum().backward()
    assert rows.grad is not None and rows.grad.tolist() == [[1, 1], [0, 0], [2, 2]]


def manage_collisions(rank: int) -> None:
    model = sharded_by(
        managed(models.EC),
        ["row_wise"] * 5,
        ManagedCollisionEmbeddingCollectionSharder(models.EC.torchrec_sharder()),
    )
    inner = model.module.embeddings._embedding_module
    assert inner._has_uninitialized_input_dist is False
    assert inner._input_dists == []


def test_managed_collisions_take_the_mark_of_the_first_batch_off() -> None:
    run(2, manage_collisions)


@pytest.mark.parametrize("stage", ["input_dist", "compute_and_output_dist", "create_context"])
def test_processed_collections_call_each_stage_of_the_inner_one(stage: str) -> None:
    method = getattr(ShardedFeatureProcessedEmbeddingBagCollection, stage)
    assert f"self._embedding_bag_collection.{stage}(" in inspect.getsource(method)


@pytest.mark.parametrize("sharding", [BaseTwEmbeddingSharding, BaseRwEmbeddingSharding])
def test_in_two_dimensions_the_group_is_that_of_the_replica(sharding: Any) -> None:
    assert "self._env.sharding_pg" in inspect.getsource(sharding.__init__)
    assert "self.sharding_pg: dist.ProcessGroup = sharding_pg" in inspect.getsource(
        ShardingEnv2D.__init__
    )
