"""Costs of GPUs against those of TorchRec's own estimator, and plans by them."""

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import PlannerError, Shard
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec_bls.sharding.cost_interface import LookupWork
from torchrec_bls.sharding.problem.tables import UniformReuse
from torchrec_bls.sharding.torchrec.planner import BLSShardingPlanner
from torchrec_bls.sharding.torchrec.topology_costs import TopologyCosts

BATCH, POOLING = 512, 7.0
GIB = 1 << 30


def topology(ranks: int, per_host: int, hbm: int = 32 * GIB) -> Topology:
    return Topology(world_size=ranks, local_world_size=per_host, compute_device="cuda", hbm_cap=hbm)


def model(rows: int, dim: int, tables: int = 1) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"]
            )
            for i in range(tables)
        ],
    )


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize(("ranks", "per_host"), [(4, 4), (8, 4)])
def test_a_whole_table_costs_what_torchrec_says(dim: int, ranks: int, per_host: int) -> None:
    of_ranks = topology(ranks, per_host)
    asked = {"t0": ParameterConstraints(["table_wise"], ["fused"], pooling_factors=[POOLING])}
    (option,) = EmbeddingEnumerator(of_ranks, BATCH, asked).enumerate(
        model(100_000, dim), [EmbeddingBagCollectionSharder()]
    )
    theirs = option.shards[0].perf
    costs = TopologyCosts(of_ranks)
    work = LookupWork(100_000, dim, 4, float(ranks * BATCH), POOLING, 1000.0, True)
    forward, backward = costs.lookup_forward([work]), costs.lookup_backward([work])
    assert forward.microseconds == pytest.approx(1000 * theirs.fwd_compute)
    assert backward.microseconds == pytest.approx(1000 * theirs.bwd_compute)
    sent = [float(ranks * BATCH * dim * 4)] + [0.0] * (ranks - 1)
    exchange = costs.all_to_all(sent, sent, "nccl", 1.0, per_host)
    assert exchange.microseconds == pytest.approx(1000 * theirs.fwd_comms)


def test_ranks_of_a_host_are_faster() -> None:
    costs = TopologyCosts(topology(8, 4))
    within, between = (
        costs.all_to_all([1e6] * 4, [1e6] * 4, "nccl", 1.0, local).microseconds for local in (4, 1)
    )
    # 600 and 12.5 GiB a second.
    assert between / within == pytest.approx(48)


def planner(of_ranks: Topology, **others: object) -> BLSShardingPlanner:
    with pytest.warns(UserWarning, match="has no costs and plans for GPUs uncalibrated"):
        return BLSShardingPlanner(of_ranks, BATCH, **others)  # type: ignore[arg-type]


def test_gpus_without_costs_are_planned_and_the_report_says_how() -> None:
    reuse = {f"t{i}": UniformReuse(100_000, POOLING) for i in range(8)}
    ours = planner(topology(4, 4), reuse=reuse)
    plan = ours.plan(model(100_000, 128, 8), [EmbeddingBagCollectionSharder()])
    held = [rank for table in dict(plan.plan[""]).values() for rank in table.ranks]
    assert sorted(held) == [0, 0, 1, 1, 2, 2, 3, 3]
    report = ours.report()
    assert "uncalibrated" in report.as_text()
    assert "uncalibrated" in report.as_html()
    assert report.as_json()["caveat"].startswith("uncalibrated")
    assert report.as_json()["job"]["backend"] == "nccl"


def test_tables_of_many_ids_stay_on_a_host() -> None:
    """Between hosts a byte takes 48 times as long: whole tables go there once, split ones more."""
    reuse = {"t0": UniformReuse(4_000_000, 20.0)}
    asked = {"t0": ParameterConstraints(sharding_types=["row_wise", "table_row_wise"])}
    ours = planner(topology(8, 4), reuse=reuse, constraints=asked)
    plan = ours.plan(model(4_000_000, 128), [EmbeddingBagCollectionSharder()])
    assert dict(plan.plan[""])["t0"].sharding_type == "table_row_wise"


def test_what_does_not_fit_into_hbm_names_the_tiers_that_are_not_planned() -> None:
    ours = planner(topology(2, 2, GIB // 2), reuse={"t0": UniformReuse(10_000_000, 1.0)})
    with pytest.raises(PlannerError, match=r"HBM.*short by.*fused_uvm_caching.*are not planned"):
        ours.plan(model(10_000_000, 128), [EmbeddingBagCollectionSharder()])


def test_torchrecs_own_estimator_rates_our_plan_no_worse_than_its_planners() -> None:
    of_ranks = topology(4, 4)
    types = ["table_wise", "column_wise", "row_wise"]
    asked = {
        f"t{i}": ParameterConstraints(types, ["fused"], pooling_factors=[1.0 + 3 * i])
        for i in range(12)
    }
    tables, sharders = model(50_000, 128, 12), [EmbeddingBagCollectionSharder()]
    theirs = EmbeddingShardingPlanner(of_ranks, BATCH, constraints=asked, debug=False)
    reuse = {f"t{i}": UniformReuse(50_000, 1.0 + 3 * i) for i in range(12)}
    ours = planner(of_ranks, constraints=asked, reuse=reuse)
    rated = [
        longest_rank(plan.plan(tables, sharders), of_ranks, asked, tables, sharders)
        for plan in (ours, theirs)
    ]
    assert rated[0] <= 1.02 * rated[1]


def longest_rank(
    plan: ShardingPlan,
    of_ranks: Topology,
    asked: dict[str, ParameterConstraints],
    tables: EmbeddingBagCollection,
    sharders: list[ModuleSharder[nn.Module]],
) -> float:
    """Returns the milliseconds of the slowest rank by TorchRec's estimator."""
    enumerator = EmbeddingEnumerator(of_ranks, BATCH, asked)
    by_type = {
        (option.name, option.sharding_type): option
        for option in enumerator.enumerate(tables, sharders)
    }
    sums = [0.0] * of_ranks.world_size
    for name, parameter in dict(plan.plan[""]).items():
        option = by_type[name, parameter.sharding_type]
        option.shards = [
            Shard(size=shard.shard_sizes, offset=shard.shard_offsets, rank=rank)
            for shard, rank in zip(parameter.sharding_spec.shards, parameter.ranks, strict=True)
        ]
        enumerator.populate_estimates([option])
        for shard in option.shards:
            sums[shard.rank] += shard.perf.total
    return max(sums)
