"""How good plans are and how long planning takes, ours and TorchRec's, on one core.

Each problem has room for every plan, or little memory. The same costs rate each plan: the predicted
step against a proven lower bound (docs/design/planner.md). TorchRec's planner has the same
constraints and statistics as far as it takes them, a process and a time of its own.
"""

import logging
import os
import resource
import time
import warnings
from itertools import product
from typing import Any

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.problem.tables import COLUMN_WISE, ROW_WISE, TABLE_WISE
from torchrec_bls.sharding.search.search import search
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.planner.page import search_table
from benchmarks.planner.random_models import Task, random_specs
from torchrec_bls.processes import RanksFailedError, run

SIZES = ((20, 4), (100, 16), (300, 32), (1000, 128))
SEEDS, BATCH = 3, 512
LIMIT_S = 600.0  # for start, plan and lower bound
_ROWS = (1e3, 2e6)
#: Memory of a rank over its part of what all tables need: as much as any plan takes, and so little
#: that it binds (a plan that may take what it likes takes two or three times the need).
MEMORY = {"plenty": 100.0, "little": 1.3}


def main() -> None:
    parser = record.parser(__doc__, quick="20 tables, little memory, one seed")
    parser.add_argument("--profile", default="epyc-milan-2-cores", help="whose costs to plan with")
    options = parser.parse_args()
    before = record.environment()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that plan
    sizes, seeds = (SIZES[:1], 1) if options.quick else (SIZES, SEEDS)
    how: Any = {"deadline_s": LIMIT_S, "start_method": "spawn"}
    results = []
    memories = ["little"] if options.quick else list(MEMORY)
    todo = list(product(sizes, memories, range(seeds), ("ours", "torchrec")))
    for (tables, ranks), memory, seed, planner in tqdm(todo, desc="plans"):
        problem = {"tables": tables, "ranks": ranks, "memory": memory, "seed": seed}
        problem["planner"] = planner
        try:
            (result,) = run(1, _plan, problem, options.profile, **how)
        except RanksFailedError as error:
            failed = error.failed[0]
            result = {"seconds": LIMIT_S, "failure": f"{failed.error}: {failed.message}"}
        results.append({**problem, **result})
    settings = {"batch": BATCH, "seeds": seeds, "profile": options.profile}
    record.publish(options.json, "sharding_search", before, settings, results, search_table)


def _plan(rank: int, problem: dict[str, Any], profile: str) -> dict[str, float]:
    tables, ranks, memory, seed, planner = problem.values()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    specs = random_specs(seed, (tables, tables), _ROWS)
    # A rank's part of weights, and of embeddings: its shards', their gradients, its samples'.
    weights = sum(spec.rows * spec.dim for spec in specs) / ranks
    needed_bytes = 4 * (weights + 3 * BATCH * sum(spec.dim for spec in specs))
    rank_bytes = int(MEMORY[memory] * needed_bytes)
    job = Job(ranks, BATCH, [rank_bytes] * ranks, backend="gloo")
    # All memory is for tables: what the rating and the lower bound take for granted.
    nothing = FixedPercentageStorageReservation(0.0)
    sharder, types = EmbeddingBagCollectionSharder(), [TABLE_WISE, COLUMN_WISE, ROW_WISE]
    task = Task(specs, sharder, job, profile, nothing, sharding_types=types, min_partition=16)
    start = time.perf_counter()
    plan = task.planners[planner].plan(task.module, task.sharders)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    bound = search(make_problem(task.workload, job, task.costs)).lower_bound
    rating = task.rating(plan)
    step = rating.step.microseconds
    return {
        "seconds": seconds,
        "peak_mib": peak,
        "step_us": step,
        "lower_bound_us": bound,
        "over_bound": step / bound - 1,
        "fullest_rank": max(rank.memory_bytes for rank in rating.ranks) / rank_bytes,
    }


if __name__ == "__main__":
    main()
