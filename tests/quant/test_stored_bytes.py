"""What travels: distinct rows as they are stored, without padding, and nothing of the weights."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from tests.distributed.models import Batch, SparseOnly
from tests.processes import run
from tests.quant import models
from torchrec_bls import BLSConfig

DIM, ROWS, IDS = 64, 512, 300
# Scale and shift, and the packed weights.
STORED = {"int8": 68, "int4": 36, "int2": 20, "fp16": 128, "fp32": 256}


def _module(kind: str) -> nn.Module:
    how = {"num_embeddings": ROWS, "embedding_dim": DIM, "name": "t0", "feature_names": ["f0"]}
    module: nn.Module = (
        EmbeddingCollection([EmbeddingConfig(**how)])
        if kind == "ec"
        else EmbeddingBagCollection([EmbeddingBagConfig(**how)], is_weighted=kind == "weighted")
    )
    return module


def test_bytes_on_the_wire() -> None:
    run(2, _bytes_on_the_wire)


def _bytes_on_the_wire(rank: int) -> None:
    models.ROWS[:] = [ROWS]  # of this process
    for kind in models.KINDS:
        for name, row_bytes in STORED.items():
            model = models.quantized(SparseOnly(_module(kind)), [name])
            config = BLSConfig(lookup="exchange")
            sharded: Any = models.shard(model, models.sharder_of(kind, config), "table_wise")
            # The table is rank 1's. Each id comes twice, in bags of two.
            ids = torch.randperm(ROWS)[:IDS].repeat(2)
            weights = torch.rand(2 * IDS) if kind == "weighted" else None
            batch = Batch(KeyedJaggedTensor(["f0"], ids, weights, torch.full((IDS,), 2)))
            with torch.no_grad():
                sharded(batch).wait()
            sent = {
                name.rsplit(".", 1)[1]: channel.stats().bytes
                for name, channel in sharded.module.embeddings.channels().items()
            }
            assert sent["embeddings"] == (IDS * row_bytes if rank == 1 else 0)
            if name == "int4" and rank == 1:
                fp32 = 2 * IDS * DIM * 4 if kind == "ec" else IDS * DIM * 4
                assert sent["embeddings"] * 6 <= fp32
            # Four bytes an id, four of the count, and what says so.
            asked = 4 * IDS if rank == 0 else 0
            blocks = 4 if rank == 0 else 0
            assert asked + blocks <= sent["ids"] <= asked + blocks + 64
            dist.barrier()
