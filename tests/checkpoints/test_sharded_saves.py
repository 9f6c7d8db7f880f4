"""Checkpoints that the ranks of a TorchRec model save together."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from tests import processes
from torchrec_bls.checkpoints import open_checkpoint

RANKS = 3
# By name: rows, and columns.
SIZES = {"by_table": (11, 8), "by_row": (10, 4), "by_column": (7, 24), "by_all": (5, 4)}


def weights_of(name: str) -> torch.Tensor:
    rows, columns = SIZES[name]
    return torch.arange(rows * columns).reshape(rows, columns) + 1000.0 * rows


def save(rank: int, path: str) -> None:
    tables = [
        EmbeddingBagConfig(
            num_embeddings=rows, embedding_dim=columns, name=name, feature_names=[f"f_{name}"]
        )
        for name, (rows, columns) in SIZES.items()
    ]
    bags = EmbeddingBagCollection(tables=tables)
    model = torch.nn.ModuleDict({"bags": bags, "dense": torch.nn.Linear(2, 3)})
    ways = {
        "by_table": table_wise(rank=1),
        "by_row": row_wise(),
        "by_column": column_wise(ranks=[0, 1, 2]),
        "by_all": data_parallel(),
    }
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        bags, ways, sharder=sharder, local_size=RANKS, world_size=RANKS, device_type="cpu"
    )
    assert dist.group.WORLD is not None
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"bags": plan}),
        sharders=[sharder],
    )
    state = sharded.state_dict()
    state["dense.weight"].fill_(7.0)
    for name in SIZES:
        value = state[f"bags.embedding_bags.{name}.weight"]
        if isinstance(value, ShardedTensor):
            for local in value.local_shards():
                (row, column), (rows, columns) = (
                    local.metadata.shard_offsets,
                    local.metadata.shard_sizes,
                )
                own = weights_of(name)[row : row + rows, column : column + columns]
                local.tensor.detach().copy_(own)
        else:
            value.detach().copy_(weights_of(name))
    dcp.save({"model": state}, checkpoint_id=path)


def test_tables_of_all_ranks_are_read_by_rows(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    processes.run(RANKS, save, str(path), deadline=300.0)
    with open_checkpoint(path) as checkpoint:
        for name in SIZES:
            rows, expected = checkpoint[f"bags.embedding_bags.{name}.weight"], weights_of(name)
            assert rows.shape == tuple(expected.shape)
            for first in range(len(expected) + 1):
                for end in range(first, len(expected) + 1):
                    assert torch.equal(rows.read(first, end), expected[first:end])
        assert torch.equal(checkpoint["dense.weight"].whole(), torch.full((3, 2), 7.0))
