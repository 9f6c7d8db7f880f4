"""Features may be named as TorchRec names embeddings: "feature@table"."""

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from tests.distributed import models
from tests.distributed.inputs.test_callers_memory import whole_samples
from tests.distributed.inputs.test_first_batches import close
from tests.processes import run
from torchrec_bls import BLSConfig

FEATURES = ["f", "f@x", "g@y"]


def bags(pooling: PoolingType) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    # "f@x" is in two tables: its embeddings are "f@x@t1" and "f@x@t2".
    names = [["f"], ["f@x"], ["g@y", "f@x"]]
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=10 + i,
                embedding_dim=4,
                feature_names=names[i],
                pooling=pooling,
            )
            for i in range(3)
        ]
    )


def make(seed: int, varies: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    strides = [2, 3, 1] if varies else [4, 4, 4]
    lengths = torch.randint(1, 4, (sum(strides),), generator=generator)
    values = torch.randint(10, (int(lengths.sum()),), generator=generator)
    rows = [torch.randint(stride, (4,), generator=generator) for stride in strides]
    return KeyedJaggedTensor(
        FEATURES,
        values,
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides] if varies else None,
        inverse_indices=(FEATURES, torch.stack(rows)) if varies else None,
    )


def look_up(rank: int, sharding: str, pooling: PoolingType, varies: bool, lookup: str) -> None:
    by = models.EBC.bls_sharder(BLSConfig(deadline=60, lookup=lookup))
    plan = models.make_plan(bags(pooling), [sharding] * 3, by)
    model = models.shard_model(models.SparseOnly(bags(pooling)), {"embeddings": plan}, [by])
    whole = models.SparseOnly(bags(pooling))
    with torch.no_grad():
        for step in range(3):
            ids = make(10 * step + rank, varies)
            found = models.flatten(model(models.Batch(ids)))
            plain = whole_samples(ids) if varies else ids
            close(found, models.flatten(whole(models.Batch(plain))))


@pytest.mark.parametrize("lookup", ["exchange", "direct"])
@pytest.mark.parametrize(
    ("sharding", "pooling", "varies"),
    [
        ("table_wise", PoolingType.SUM, True),
        ("row_wise", PoolingType.MEAN, True),
        ("row_wise", PoolingType.MEAN, False),
    ],
)
def test_a_feature_is_not_taken_for_another(
    sharding: str, pooling: PoolingType, varies: bool, lookup: str
) -> None:
    run(2, look_up, sharding, pooling, varies, lookup)
