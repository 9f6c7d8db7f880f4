"""TorchRec's seams for planners, from 1.9 on: its executor runs our planner, its reporter ours."""

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec_bls.sharding
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec_bls.sharding import BLSShardingPlanner
from torchrec_bls.sharding.costs.profiled import ProfiledCosts

from tests.processes import run
from tests.sharding.additive_costs import AdditiveTestCosts
from tests.sharding.synthetic import small_profile
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, BLSEmbeddingCollectionSharder

SEAMS = find_spec("torchrec.distributed.planner.provider") is not None
if SEAMS:
    from torchrec.distributed.planner.api import ProductionPlannerOrchestrator
    from torchrec.distributed.planner.dry_run import DryRunOrchestrator, DryRunRequest
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.provider import PlannerProvider
    from torchrec.distributed.planner.reporter import DefaultPlanReporter, PlanReporter
    from torchrec.distributed.planner.types import (
        PlannerConfig,
        PlannerSessionContext,
        PlannerVariant,
        ShardingPlanRequest,
        TrainingFramework,
    )
    from torchrec_bls.sharding import BLSPlannerProvider, BLSPlanReporter
with_seams = pytest.mark.skipif(not SEAMS, reason="this torchrec has no PlannerProvider")

SHARDERS = [BLSEmbeddingBagCollectionSharder(), BLSEmbeddingCollectionSharder()]
ROWS = (4000, 70, 100, 13000)
WEIGHTS = sum(2 * 4 * 32 * rows for rows in ROWS)  # bytes, and the optimizer's state on top
BATCH = 64
REQUEST: dict[str, Any] = {
    "sharders": SHARDERS,
    "world_size": 2,
    "local_world_size": 2,
    "batch_size": BATCH,
    "compute_device": "cpu",
    "ddr_gb": 16.0,
}


class Model(nn.Module):
    """Pooled and unpooled tables."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        names = [(f"t{index}", rows, [f"f{index}"]) for index, rows in enumerate(ROWS)]
        self.bags = EmbeddingBagCollection(
            device=meta,
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=32, num_embeddings=rows, feature_names=features
                )
                for name, rows, features in names
            ],
        )
        self.sequences = EmbeddingCollection(
            device=meta,
            tables=[
                EmbeddingConfig(
                    name=name, embedding_dim=32, num_embeddings=rows, feature_names=features
                )
                for name, rows, features in names
            ],
        )


def own_planner() -> BLSShardingPlanner:
    return BLSShardingPlanner(
        Topology(world_size=2, local_world_size=2, compute_device="cpu", ddr_cap=16 << 30),
        BATCH,
        storage_reservation=HeuristicalStorageReservation(0.15),
        costs=AdditiveTestCosts(),
    )


def execute(
    provider: Any = None, reporter: Any = None, sku: str = "here", **others: Any
) -> tuple[Any, Any]:
    """Returns TorchRec's result of a plan, and its context."""
    request = ShardingPlanRequest(**{"model": Model(), **REQUEST, **others})
    context = PlannerSessionContext(request=request, results={})
    executor = DefaultPlannerExecutor(provider or BLSPlannerProvider(costs=AdditiveTestCosts()))
    orchestrator = ProductionPlannerOrchestrator(executor, sku, reporter)
    return orchestrator.plan(request, context)[sku], context


def test_the_names_are_there_where_torchrec_has_the_seams() -> None:
    for name in ("BLSPlannerProvider", "BLSPlanReporter"):
        assert hasattr(torchrec_bls.sharding, name) is SEAMS
        assert (name in torchrec_bls.sharding.__all__) is SEAMS
    if not SEAMS:
        with pytest.raises(AttributeError, match=r"BLSPlannerProvider needs torchrec 1\.9"):
            _ = torchrec_bls.sharding.BLSPlannerProvider
    with pytest.raises(AttributeError, match="no attribute 'Planner'"):
        _ = torchrec_bls.sharding.Planner


@with_seams
def test_they_are_what_torchrec_asks_for() -> None:
    assert isinstance(BLSPlannerProvider(costs=AdditiveTestCosts()), PlannerProvider)
    assert isinstance(BLSPlanReporter(), PlanReporter)


@with_seams
def test_the_plan_through_the_provider_is_the_planners(tmp_path: Path) -> None:
    planner = own_planner()
    expected = planner.plan(Model(), SHARDERS)
    result, context = execute(reporter=BLSPlanReporter(tmp_path))
    assert result.success
    assert result.sharding_plan == expected
    assert context.topology_cache["here", 2, 2].compute_device == "cpu"

    shards = [
        (option.fqn, option.sharding_type, shard.rank, list(shard.size), list(shard.offset))
        for option in result.sharding_options
        for shard in option.shards
    ]
    planned = [
        (f"{path}.{name}", one.sharding_type, rank, metadata.shard_sizes, metadata.shard_offsets)
        for path, tables in expected.plan.items()
        for name, one in tables.items()
        for rank, metadata in zip(one.ranks, one.sharding_spec.shards, strict=True)
    ]
    assert sorted(shards) == sorted(planned)
    assert all(option.total_perf > 0 for option in result.sharding_options)
    assert sum(option.total_ddr_bytes for option in result.sharding_options) >= WEIGHTS
    assert result.estimated_max_ddr_bytes >= WEIGHTS / 2
    assert result.estimated_max_hbm_bytes == 0


@with_seams
def test_tables_that_gpus_read_are_in_host_memory() -> None:
    direct = [type(each)(config=BLSConfig(lookup="direct")) for each in SHARDERS]
    by_cpus = BLSPlannerProvider(costs=ProfiledCosts(small_profile()))
    with pytest.warns(UserWarning, match="costs of that are not calibrated"):
        result, _ = execute(by_cpus, sharders=direct, compute_device="cuda")
    assert {option.compute_kernel for option in result.sharding_options} == {"fused_uvm"}
    assert sum(option.total_ddr_bytes for option in result.sharding_options) >= WEIGHTS
    assert result.estimated_max_hbm_bytes == 0


@with_seams
def test_the_reporter_writes_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    planner = own_planner()
    planner.plan(Model(), SHARDERS)
    report = planner.report()
    folder = tmp_path / "plans"
    with caplog.at_level(logging.INFO, "torchrec_bls.sharding.torchrec.reporter"):
        result, _ = execute(reporter=BLSPlanReporter(folder), sku="rack/2 cores")
    assert report.as_text() in caplog.text
    assert (folder / "rack_2_cores.txt").read_text() == report.as_text() + "\n"
    assert "<html" in (folder / "rack_2_cores.html").read_text()
    location = folder / "rack_2_cores.json"
    assert json.loads(location.read_text()) == json.loads(json.dumps(report.as_json()))
    assert result.sharding_plan_manifold_url == str(location)


@with_seams
def test_a_report_that_cannot_be_written_costs_no_plan(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"report of the plan for here is not in .*used all the"):
        result, _ = execute(reporter=BLSPlanReporter(tmp_path / "file"))
    assert result.success
    assert result.sharding_plan_manifold_url is None


@with_seams
def test_the_reporters_of_others() -> None:
    """TorchRec's statistics take our plan; of TorchRec's plan there is no report of ours."""
    result, _ = execute(reporter=DefaultPlanReporter())
    assert result.success
    from torchrec.distributed.planner.provider import DefaultPlannerProvider

    with pytest.warns(UserWarning, match="made by a planner of TorchRec"):
        result, _ = execute(DefaultPlannerProvider(), BLSPlanReporter())
    assert result.success


@with_seams
def test_the_device_is_the_profiles_where_the_request_says_none() -> None:
    provider = BLSPlannerProvider(costs=ProfiledCosts(small_profile()), training=False)
    _, context = execute(provider, compute_device=None)
    assert context.topology_cache["here", 2, 2].compute_device == "cpu"


@with_seams
def test_what_the_provider_cannot_do() -> None:
    with pytest.raises(ValueError, match="planner_variant LINEAR_PROGRAMMING"):
        execute(planner_config=PlannerConfig(planner_variant=PlannerVariant.LINEAR_PROGRAMMING))
    with pytest.warns(UserWarning, match="planner_config has proposer_type, partitioner_type,"):
        execute(
            planner_config=PlannerConfig(proposer_type="greedy", partitioner_type="greedy_perf")
        )
    with pytest.raises(ValueError, match="no costs of SKU 'here', only of there"):
        execute(BLSPlannerProvider(costs={"there": AdditiveTestCosts()}))


@with_seams
def test_a_plan_that_fits_nowhere_is_a_result() -> None:
    result, _ = execute(ddr_gb=1e-4)
    assert not result.success
    assert result.sharding_plan is None
    assert "no plan fits" in result.planner_failure_reason
    assert "short by" in result.planner_failure_reason


@with_seams
def test_a_dry_run_over_machines() -> None:
    class Slower(AdditiveTestCosts):
        op_us = 2000.0

    request = DryRunRequest(
        model=Model,
        sku_list=["fast", "slow", "unknown"],
        training_framework=TrainingFramework.APF,
        **REQUEST,
    )
    context = PlannerSessionContext(request=request, results={})
    provider = BLSPlannerProvider(costs={"fast": AdditiveTestCosts(), "slow": Slower()})
    results = DryRunOrchestrator(DefaultPlannerExecutor(provider), BLSPlanReporter()).plan(
        request, context
    )
    assert [results[sku].success for sku in request.sku_list] == [True, True, False]
    assert "no costs of SKU 'unknown'" in results["unknown"].planner_failure_reason


def plan_together(rank: int, folder: str) -> tuple[Any, ...]:
    result, _ = execute(reporter=BLSPlanReporter(Path(folder) / str(rank)))
    assert dist.get_rank() == rank
    return result.sharding_plan, len(result.sharding_options), result.is_planning_rank


@with_seams
def test_one_rank_plans_for_all(tmp_path: Path) -> None:
    first, second = run(2, plan_together, str(tmp_path))
    assert first == (own_planner().plan(Model(), SHARDERS), 2 * len(ROWS), True)
    assert second == (first[0], 0, False)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0"]
