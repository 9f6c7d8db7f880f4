"""Measured steps of drawn models under many plans, for the study of how well steps are predicted.

Suite A has two ranks with a core each, suite B four ranks on two cores. Plans are those of the
named sharders, of TorchRec's planner, and our planner's five best. All plans of a model take turns
step by step in the same processes. Every model is visited twice, far apart, since a machine that
others share has slow minutes. Every visit is kept, and the same command goes on where it stopped.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec_bls.sharding.calibration.step_models import (
    ModelRanges,
    StepModel,
    StepTask,
    draw_step_model,
)
from torchrec_bls.sharding.calibration.steps import Embeddings, measure_steps, sharders
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import ALL_RANKS, make_problem, options_of
from torchrec_bls.sharding.problem.tables import (
    SHARDING_TYPES,
    PlacedShard,
    PlacedTable,
    Workload,
)
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.torchrec.plan import from_sharding_plan
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.simulator.sharders import TABLE_III, table_iii_plan

# Unlike those that a calibration draws: more and larger tables, other widths, longer bags.
RANGES = ModelRanges(
    collections=3,
    tables=(2, 20),
    rows=(1e3, 1e6),
    dims=(12, 16, 24, 40, 64, 80, 160),
    pooling=(1, 50),
    sequence=(1, 20),
    batch=(64, 2048),
    weights_bytes=128 * 2**20,
    elements=8_000_000,
)
SUITES = {"A": 2, "B": 4}
CORES = 2
SAME = " = "
_BEST, _VISITS = 5, 2
_SEED = 2026


def job_of(suite: str, number: int, model: StepModel) -> Job:
    """What a model's plans are for: backends take turns, and so do training and inference."""
    backend, training = ("bls", "gloo")[number % 2], number // 2 % 2 == 0
    return model.job(SUITES[suite], CORES, backend, training=training)


def plans_of(
    model: StepModel, workload: Workload, job: Job, costs: ProfiledCosts, seed: int
) -> dict[str, tuple[PlacedTable, ...]]:
    """Our planner's best plans, TorchRec's, and those of named sharders.

    Each is there once, by all of its names: "ours 2 = naive".
    """
    found = search(make_problem(workload, job, costs))
    best = [found, *found.others][:_BEST]
    plans = {f"ours {number}": each.plan for number, each in enumerate(best, 1)}
    for name in TABLE_III:
        plans[name] = table_iii_plan(name, workload, job, seed)
    plans["row_wise"] = tuple(
        option.placed(table, list(range(job.ranks)))
        for index, table in enumerate(workload.tables)
        for option in options_of(index, table, job)
        if option.spread == ALL_RANKS
    )
    plans["torchrec"] = _torchrec_plan(model, workload, job)
    names: defaultdict[tuple[PlacedTable, ...], list[str]] = defaultdict(list)
    for name, plan in plans.items():
        names[plan].append(name)
    return {SAME.join(of_plan): plan for plan, of_plan in names.items()}


def _torchrec_plan(model: StepModel, workload: Workload, job: Job) -> tuple[PlacedTable, ...]:
    """Of TorchRec's planner as it comes, told the mean ids of a sample; without data-parallel
    tables, whose gradients nothing here would reduce."""
    constraints = {
        table.name: ParameterConstraints(
            list(SHARDING_TYPES), pooling_factors=[workload.reuse_of(table).pooling_factor]
        )
        for table in workload.tables
    }
    topology = Topology(world_size=job.ranks, local_world_size=job.ranks, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology, job.batch, constraints=constraints, debug=False)
    return from_sharding_plan(planner.plan(Embeddings(model), sharders(job.backend)), workload)


def model_of(number: int) -> StepModel:
    return draw_step_model(f"model {number}", (_SEED, number), RANGES)


def main() -> None:
    parser = record.parser(__doc__)
    parser.set_defaults(json=Path("out/simulator_steps.json"))
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60, help="of each plan, of both visits")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--seconds", type=float, default=6 * 3600, help="begin no model after")
    parser.add_argument("--profile", default="epyc-milan-2-cores", help="file or name")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    costs = ProfiledCosts(load_profile(options.profile))
    settings = {"steps": options.steps, "profile": options.profile}
    empty = {"benchmark": "simulator_steps", "environment": record.environment()}
    kept = record.Resumable(options.json, {**empty, "settings": settings, "results": []}, dict)
    end = time.monotonic() + options.seconds
    for suite in options.suites:
        for visit in range(_VISITS):
            at = {"suite": suite, "visit": visit}
            done = {each["model"] for each in kept.raw["results"] if at.items() <= each.items()}
            todo = [number for number in range(options.models) if number not in done]
            for result in _measured(suite, todo, costs, options.steps // _VISITS):
                kept.add({**at, **result})
                if time.monotonic() > end:
                    return


def _measured(
    suite: str, numbers: list[int], costs: ProfiledCosts, steps: int
) -> Iterator[dict[str, Any]]:
    if not numbers:
        return
    tasks = []
    for number in tqdm(numbers, desc="planning", unit="model"):
        model = model_of(number)
        job = job_of(suite, number, model)
        plans = plans_of(model, model.workload(job.ranks), job, costs, number)
        tasks.append(StepTask(model, job.backend, job.training, plans, steps))
    pinned = SUITES[suite] <= CORES
    measured = measure_steps(SUITES[suite], tasks, pinned=pinned)
    bar = tqdm(measured, desc=f"suite {suite}", total=len(tasks), unit="model")
    for number, task, times in zip(numbers, tasks, bar, strict=True):
        plans = {
            name: {"us": us, "tables": _packed(task.plans[name])} for name, us in times.items()
        }
        yield {"model": number, "plans": plans}


def _packed(plan: tuple[PlacedTable, ...]) -> list[Any]:
    """Sharding type of each table, with rank, rows, columns and offsets of each shard."""
    return [
        [placed.sharding_type, [list(vars(shard).values()) for shard in placed.shards]]
        for placed in plan
    ]


def unpacked(tables: list[Any], workload: Workload) -> tuple[PlacedTable, ...]:
    return tuple(
        PlacedTable(table, sharding_type, tuple(PlacedShard(*shard) for shard in shards))
        for table, (sharding_type, shards) in zip(workload.tables, tables, strict=True)
    )


if __name__ == "__main__":
    main()
