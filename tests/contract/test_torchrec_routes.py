"""What the routes past TorchRec's input_dist count on."""

from typing import Any

import pytest
import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.contract.test_torchrec_modules import KINDS, NODES
from tests.distributed import models
from tests.processes import run


def names_on_rank(rank: int, name: str) -> None:
    kind = KINDS[name]
    models.set_nodes(NODES)
    module = models.shard(kind, "mixed", kind.torchrec_sharder(), NODES).module.embeddings
    if kind is models.EC:
        assert module._enabled_feature_score_auto_collection is False
        assert module._need_indices is False
        shardings = list(module._sharding_type_to_sharding.values())
    else:
        # TorchRec 1.6 has none.
        assert getattr(module, "_enabled_feature_score_auto_collection", False) is False
        shardings = module._embedding_shardings
        assert len(shardings) == len(module._sharding_types)
    for sharding, lookup in zip(shardings, module._lookups, strict=True):
        assert all(isinstance(feature, str) for feature in sharding.feature_names())
        # What each rank looks up, in order, of which codecs are made a plan.
        assert len(sharding._grouped_embedding_configs_per_rank) == NODES
        planned = [
            group.embedding_tables for group in sharding._grouped_embedding_configs_per_rank[rank]
        ]
        kernels = [kernel.config.embedding_tables for kernel in lookup._emb_modules]
        assert [_shards(tables) for tables in planned] == [_shards(tables) for tables in kernels]


def _shards(tables: list[Any]) -> list[tuple[str, int, list[str]]]:
    return [(table.name, table.local_cols, table.feature_names) for table in tables]


@pytest.mark.parametrize("name", [models.EC.name, models.WEIGHTED.name])
def test_a_module_says_what_its_input_dist_computes(name: str) -> None:
    run(NODES, names_on_rank, name)


def test_a_jagged_tensor_is_its_four_fields() -> None:
    values, lengths = torch.arange(6.0).view(3, 2), torch.tensor([1, 0, 2])
    ours = JaggedTensor.__new__(JaggedTensor)
    ours._values, ours._weights, ours._lengths, ours._offsets = values, None, lengths, None
    theirs = JaggedTensor(values=values, lengths=lengths)
    assert vars(ours).keys() == vars(theirs).keys()
    assert ours.offsets().tolist() == theirs.offsets().tolist()
    assert [t.tolist() for t in ours.to_dense()] == [t.tolist() for t in theirs.to_dense()]


def test_contexts_have_the_fields_that_a_route_sets() -> None:
    sequence = vars(SequenceShardingContext())
    assert {"features_before_input_dist", "unbucketize_permute_tensor"} <= sequence.keys()
    pooled = EmbeddingShardingContext(batch_size_per_feature_pre_a2a=[1])
    assert pooled.variable_batch_per_feature is False
