"""A step of the benchmark that executes plans trains tables of every kind."""

from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from benchmarks.planner.executed import optimizer_of, step_ms
from benchmarks.planner.random_models import TableSpec, module_of
from tests.processes import run
from tests.tiers import slow_but


def moved(rank: int, data_parallel_tables: int) -> dict[str, list[list[float]]]:
    """What two steps change in the first two rows of each table that this rank holds."""
    kinds: dict[str, Any] = {f"t{index}": data_parallel() for index in range(data_parallel_tables)}
    kinds[f"t{data_parallel_tables}"] = table_wise(rank=1)
    module = module_of([TableSpec(rows=8, dim=4, pooling=1.0, skew=0.0)] * len(kinds))
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.01})
    of_module = construct_module_sharding_plan(
        module, kinds, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=ShardingPlan({"": of_module}), sharders=[sharder]
    )
    batch = KeyedJaggedTensor(
        keys=[f"f{index}" for index in range(len(kinds))],
        values=torch.zeros(len(kinds), dtype=torch.int64),  # row 0 of each
        lengths=torch.ones(len(kinds), dtype=torch.int32),
    )
    before = held(model)
    optimizer = optimizer_of(model)
    for _ in range(2):
        assert step_ms(model, optimizer, iter([batch])) > 0
    return {name: (rows - before[name])[:2].tolist() for name, rows in held(model).items()}


def held(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    rows = {}
    for path, weight in model.state_dict().items():
        name = path.split(".")[-2]
        if hasattr(weight, "local_shards"):
            shards = weight.local_shards()
            if not shards:
                continue
            weight = shards[0].tensor
        rows[name] = weight.detach().clone()
    return rows


@pytest.mark.parametrize("data_parallel_tables", slow_but([1], [0, 1]))
def test_every_table_takes_sgds_step(data_parallel_tables: int) -> None:
    first, second = run(2, moved, data_parallel_tables)
    # Two steps of -0.01 times a gradient of 1 a rank, which TorchRec averages over the ranks.
    expected = [pytest.approx([-0.02] * 4, abs=1e-6), [0.0] * 4]
    assert second == {f"t{index}": expected for index in range(data_parallel_tables + 1)}
    assert first == {f"t{index}": expected for index in range(data_parallel_tables)}
