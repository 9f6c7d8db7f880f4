"""How good plans are and how long planning takes, ours and TorchRec's, on one core.

Generated problems from 20 tables on 4 ranks to 1,000 on 128, each with room for every plan and with
little memory. Each plan is rated by the same costs: the predicted step against a proven lower bound
(docs/design/planner.md). TorchRec's planner has the same constraints and statistics as far as it
takes them, a process and a time of its own.
"""

import itertools
import os
import resource
import time
import warnings
from collections.abc import Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.planner.page import search_table
from benchmarks.planner.random_models import TableSpec, ZipfReuse, module_of, random_specs
from torchrec_bls.processes import RanksFailedError, run

SIZES = ((20, 4), (100, 16), (300, 32), (1000, 128))
BATCH = 512
PROFILE = "epyc-milan-2-cores"
LIMIT_SECONDS = 600.0  # for start, plan and lower bound
_ROWS = (1e3, 2e6)
#: Memory of a rank over its part of what all tables need: as much as any plan takes, and so little
#: that it binds (a plan that may take what it likes takes two or three times the need).
MEMORY = {"plenty": 100.0, "little": 1.3}


def main() -> None:
    """Plans all problems and prints a table."""
    parser = record.parser(__doc__, quick="20 tables, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--profile", default=PROFILE, help="whose costs to plan with")
    options = parser.parse_args()
    before = record.environment()
    sizes, seeds = (SIZES[:1], 1) if options.quick else (SIZES, options.seeds)
    todo = list(itertools.product(sizes, MEMORY, range(seeds), ("ours", "torchrec")))
    results = []
    for (tables, ranks), memory, seed, planner in tqdm(todo, desc="plans"):
        arguments = (planner, tables, ranks, memory, seed, options.profile)
        problem = {"tables": tables, "ranks": ranks, "memory": memory, "seed": seed}
        try:
            (result,) = run(1, _plan, *arguments, deadline_s=LIMIT_SECONDS, start_method="spawn")
        except RanksFailedError as error:
            failed = error.failed[0]
            what = f"{failed.error}: {failed.message}"
            result = {"seconds": LIMIT_SECONDS, "failure": what}
        results.append({**problem, "planner": planner, **result})
    settings = {"batch": BATCH, "seeds": seeds, "profile": options.profile}
    record.publish(options.json, "sharding_search", before, settings, results, search_table)


def _plan(
    rank: int, planner: str, tables: int, ranks: int, memory: str, seed: int, profile: str
) -> dict[str, Any]:
    import logging

    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec_bls.sharding.costs.profile import load_profile
    from torchrec_bls.sharding.costs.profiled import ProfiledCosts
    from torchrec_bls.sharding.problem.job import Job
    from torchrec_bls.sharding.problem.options import make_problem
    from torchrec_bls.sharding.report.prediction import rate
    from torchrec_bls.sharding.search.search import search
    from torchrec_bls.sharding.torchrec.plan import from_sharding_plan
    from torchrec_bls.sharding.torchrec.planner import BLSShardingPlanner
    from torchrec_bls.sharding.torchrec.tables import workload_of

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    specs = random_specs(seed, (tables, tables), _ROWS)
    module = module_of(specs)
    sharder = EmbeddingBagCollectionSharder()
    reuse = {f"t{index}": ZipfReuse(spec, BATCH * ranks) for index, spec in enumerate(specs)}
    workload = workload_of(module, [sharder], "cpu", 1, reuse=reuse)
    # What both can shard.
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=list(table.sharding_types),
            pooling_factors=[spec.pooling],
            min_partition=16,
        )
        for table, spec in zip(workload.tables, specs, strict=True)
    }
    rank_bytes = int(MEMORY[memory] * _needed_bytes(specs, ranks))
    topology = Topology(world_size=ranks, compute_device="cpu", ddr_cap=rank_bytes)
    costs = ProfiledCosts(load_profile(profile))
    # All memory is for tables: what the rating and the lower bound take for granted.
    nothing = FixedPercentageStorageReservation(0.0)
    if planner == "ours":
        ours = BLSShardingPlanner(
            topology, BATCH, nothing, constraints, costs=costs, reuse=reuse, backend="gloo"
        )
        plan_with = ours.plan
    else:
        options = {"storage_reservation": nothing, "constraints": constraints, "debug": False}
        plan_with = EmbeddingShardingPlanner(topology, BATCH, **options).plan
    start = time.perf_counter()
    plan = plan_with(module, [sharder])
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    job = Job(ranks, BATCH, [rank_bytes] * ranks, backend="gloo")
    workload = workload_of(module, [sharder], "cpu", 1, constraints, reuse)
    bound = search(make_problem(workload, job, costs)).lower_bound
    rating = rate(from_sharding_plan(plan, workload), workload, job, costs)
    step = rating.step.microseconds
    return {
        "seconds": seconds,
        "peak_mib": peak,
        "step_us": step,
        "lower_bound_us": bound,
        "over_bound": step / bound - 1,
        "fullest_rank": max(rank.memory_bytes for rank in rating.ranks) / rank_bytes,
    }


def _needed_bytes(specs: Sequence[TableSpec], ranks: int) -> float:
    """A rank's part of weights, and of embeddings: its shards', their gradients, its samples'."""
    weights = sum(spec.rows * spec.dim for spec in specs) / ranks
    return 4 * (weights + 3 * BATCH * sum(spec.dim for spec in specs))


if __name__ == "__main__":
    main()
