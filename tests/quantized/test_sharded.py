"""The study's DLRM, its tables sharded among 4 ranks that send embeddings in 4 bits and gradients
in 2, follows the study's emulation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from benchmarks.quantized.dlrm import DLRM, EMBEDDING_DIM, LEARNING_RATE, Collectives
from benchmarks.quantized.planted_clicks import PlantedClicks
from tests.distributed import models
from tests.processes import run
from tests.quantized.test_messages import BATCH, ROWS, STEPS, TABLES, difference, emulated
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, CodecConfig
from torchrec_bls.codecs.rows import Codec

RANKS = 4
KEYS = [f"f{place}" for place in range(TABLES)]


def shard_tables(weights: torch.Tensor) -> DistributedModelParallel:
    """Shards tables of ROWS, whose weights lie behind each other."""
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                num_embeddings=rows,
                embedding_dim=EMBEDDING_DIM,
                name=f"t{place}",
                feature_names=[KEYS[place]],
            )
            for place, rows in enumerate(ROWS)
        ]
    )
    with torch.no_grad():
        for bag, rows in zip(module.embedding_bags.values(), weights.split(ROWS), strict=True):
            bag.weight.copy_(rows)
    sharder = BLSEmbeddingBagCollectionSharder(
        config=BLSConfig(codecs=CodecConfig(forward="uint4", backward="uint2")),
        fused_params={"learning_rate": LEARNING_RATE},
    )
    plan = models.make_plan(module, ["table_wise"] * TABLES, sharder)
    return models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])


def train(rank: int) -> list[float]:
    """Returns the losses of all samples, which the ranks share out."""
    model = DLRM(ROWS, seed=2)
    tables = shard_tables(model.tables)
    clicks = PlantedClicks(ROWS, seed=0).draw(STEPS * BATCH, seed=1)
    losses = []
    for begin in range(rank * BATCH // RANKS, STEPS * BATCH, BATCH):
        batch = clicks.rows(begin, begin + BATCH // RANKS)
        ids = KeyedJaggedTensor(
            KEYS,
            torch.from_numpy(batch.ids).T.flatten(),
            lengths=torch.ones(batch.ids.size, dtype=torch.int32),
        )
        output = models.arrived(tables(models.Batch(ids)))
        columns = output.to_dict()
        rows = torch.stack([columns[key] for key in KEYS], dim=1)
        logits = model(torch.from_numpy(batch.dense), rows)
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(batch.labels)
        )
        loss.backward()
        with torch.no_grad():
            for parameter in model.layers.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= LEARNING_RATE / RANKS * parameter.grad
                parameter.grad = None
            mean = loss.detach() / RANKS
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def test_a_sharded_dlrm_follows_the_emulation() -> None:
    how = Collectives(RANKS, Codec.UINT4, Codec.UINT2)
    expected = emulated(how)
    for losses in run(RANKS, train):
        assert difference(losses, expected) < 1e-3
    for codecs in ((Codec.FP32, Codec.UINT2), (Codec.UINT4, Codec.FP32)):
        assert difference(emulated(Collectives(RANKS, *codecs)), expected) > 2e-3
