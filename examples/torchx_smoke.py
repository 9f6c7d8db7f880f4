"""Smoke test of an installation: a sharded model on the bounded-lag exchange, checked.

Every rank shards one EmbeddingBagCollection, table-wise and row-wise, and compares what it gets
for its own batch with the unsharded collection. Run it with two ranks by

    torchx run -s local_cwd dist.ddp -j 1x2 --script examples/torchx_smoke.py

or with `torchrun --nproc-per-node 2 examples/torchx_smoke.py`.
"""

import logging

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder

ROWS, DIM, BATCH, BATCHES = 1000, 16, 32, 4
CPU = torch.device("cpu")
FUSED = EmbeddingComputeKernel.FUSED.value


def make_collection() -> EmbeddingBagCollection:
    """Returns the same collection on every rank: one table to place, one to split by rows."""
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"{name}_id"]
            )
            for name in ("placed", "split")
        ],
        device=CPU,
    )


def shard(collection: EmbeddingBagCollection) -> DistributedModelParallel:
    """Returns ``collection`` sharded over all ranks, with its own weights."""
    sharder = BLSEmbeddingBagCollectionSharder(config=BLSConfig(expected_batch=BATCH))
    plan = construct_module_sharding_plan(
        collection,
        {
            "placed": table_wise(rank=dist.get_world_size() - 1, compute_kernel=FUSED),
            "split": row_wise(compute_kernel=FUSED),
        },
        sharder=sharder,
        world_size=dist.get_world_size(),
        local_size=dist.get_world_size(),
        device_type="cpu",
    )
    assert dist.group.WORLD is not None
    return DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def make_batch(step: int) -> KeyedJaggedTensor:
    """Returns one batch of this rank: zero to two ids per sample and feature."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    lengths = torch.randint(0, 3, (2 * BATCH,), generator=generator, dtype=torch.int32)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=["placed_id", "split_id"], values=ids, lengths=lengths)


def main() -> None:
    """Compares every batch and prints one line from rank 0."""
    # TorchRec calls a name of torch.fx that is deprecated: no user can act on it.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    expected, model = make_collection(), shard(make_collection())
    with torch.no_grad():
        for step in range(BATCHES):
            batch = make_batch(step)
            torch.testing.assert_close(
                model(batch).wait().to_dict(), expected(batch).to_dict(), rtol=1e-6, atol=1e-6
            )
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"OK: {BATCHES} batches on {dist.get_world_size()} ranks equal the unsharded module")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
