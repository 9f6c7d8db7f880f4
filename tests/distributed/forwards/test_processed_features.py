"""A rank whose forward has ended early still processes the features of the others' ids."""

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedTensor
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_bls
from tests.distributed import models
from tests.distributed.forwards.cells import cell
from tests.processes import run
from torchrec_bls import BLSConfig

KIND = models.WEIGHTED


def processed() -> nn.Module:
    """Returns bags whose weights are another number for each position."""
    inner: Any = KIND.module()
    processors = PositionWeightedModuleCollection(dict.fromkeys(KIND.features, 5))
    for number, weights in enumerate(processors.parameters()):
        weights.data.copy_(torch.arange(5) + 0.1 * number)
    return FeatureProcessedEmbeddingBagCollection(inner, processors)


class Model(models.SparseOnly):
    """Fails for a request that is none."""

    def forward(self, batch: models.Batch | None) -> Any:
        if batch is None:
            raise ArithmeticError("by order")
        return models.arrived(self.embeddings(batch.ids))


def compare(output: KeyedTensor, ids: Any) -> None:
    wanted = processed()(ids)
    torch.testing.assert_close(output.to_dict(), wanted.to_dict())


@torch.no_grad()
def fail_in_turn(rank: int, lookup: str) -> None:
    for sharding in ("table_wise", "row_wise"):
        by: Any = KIND.bls_sharder(BLSConfig(deadline=60, lookup=lookup, name=sharding))
        module: Any = processed()
        plan = models.make_plan(module._embedding_bag_collection, [sharding] * KIND.tables, by)
        outer = FeatureProcessedEmbeddingBagCollectionSharder(by)
        model = models.shard_model(Model(module), {"embeddings": plan}, [outer])

        def check(seed: int, model: Any = model) -> None:
            def ids() -> Any:  # processors write to them
                return models.make_ids(KIND, 10 * seed + rank, 3)

            compare(model(models.Batch(ids())), ids())

        check(0)
        for turn in range(4):
            with cell(sharding, turn):
                if rank != turn % 2:
                    check(turn)
                elif turn < 2:
                    with pytest.raises(ArithmeticError):
                        model(None)
                else:
                    with pytest.raises(ArithmeticError), torchrec_bls.forward(model.module):
                        raise ArithmeticError("before any call")
                check(turn + 10)
        bad = models.make_ids(KIND, 5, 3)
        bad.values()[0] = 10_000
        with cell(sharding, "a bad request"):
            if rank == 1:
                with pytest.raises(ValueError, match="id 10000"):
                    model(models.Batch(bad))
            else:
                check(20)
            check(21)
        with cell(sharding, "bad requests of all ranks"):
            with pytest.raises(ValueError, match="id 10000"):
                model(models.Batch(bad))
            check(22)


@pytest.mark.parametrize("lookup", ["exchange", pytest.param("direct", marks=pytest.mark.slow)])
def test_features_of_other_ranks_are_processed_after_a_failure(lookup: str) -> None:
    run(2, fail_in_turn, lookup)
