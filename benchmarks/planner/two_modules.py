"""Plans of 1,000 tables in two modules on 128 ranks: how long planning takes, how good they are.

Half of the tables are pooled, half an EmbeddingCollection's, which doubles the ways of sharding.
Over both backends, training and inference, on one core; TorchRec's planner is in `search`.
"""

import time
import warnings
from itertools import product
from typing import Any

import numpy as np
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import Problem, make_problem
from torchrec_bls.sharding.problem.tables import (
    COLUMN_WISE,
    ROW_WISE,
    TABLE_WISE,
    Table,
    Workload,
)
from torchrec_bls.sharding.search.search import search

from benchmarks.harness import page, record
from benchmarks.harness.launch import pin_to_core
from benchmarks.planner.random_models import ZipfReuse, random_specs

TABLES, RANKS, BATCH = 1000, 128, 512
_ROWS = (1e3, 2e6)
_TYPES = (TABLE_WISE, COLUMN_WISE, ROW_WISE)
# Tables of an EmbeddingCollection have one width.
_COLUMNS = 64


def main() -> None:
    parser = record.parser(__doc__, quick="40 tables on 16 ranks, one seed")
    parser.add_argument("--profile", default="epyc-milan-2-cores", help="whose costs to plan with")
    options = parser.parse_args()
    before = record.environment()
    warnings.simplefilter("ignore")
    pin_to_core(0)
    tables, ranks, seeds = (40, 16, 1) if options.quick else (TABLES, RANKS, 2)
    costs = ProfiledCosts(load_profile(options.profile))
    results = []
    for backend, training, seed in product(("bls", "gloo"), (True, False), range(seeds)):
        job = Job(ranks, BATCH, [1 << 40] * ranks, backend=backend, training=training)
        problem = problem_of(seed, tables, job, costs)
        start = time.perf_counter()
        found = search(problem)
        seconds = time.perf_counter() - start
        kind = {"backend": backend, "training": training, "seed": seed, "seconds": seconds}
        results.append({**kind, "step_us": found.objective, "lower_bound_us": found.lower_bound})
    settings = {"tables": tables, "ranks": ranks, "batch": BATCH, "profile": options.profile}
    record.publish(options.json, "two_modules", before, settings, results, section)


def problem_of(seed: int, tables: int, job: Job, costs: ProfiledCosts) -> Problem:
    """A random problem; each other table is pooled."""
    made, reuse = [], {}
    for number, spec in enumerate(random_specs(seed, (tables, tables), _ROWS)):
        pooled = number % 2 == 0
        table = Table(
            f"t{number}",
            spec.rows,
            spec.dim if pooled else _COLUMNS,
            "bags" if pooled else "rows",
            pooled=pooled,
            sharding_types=_TYPES,
            min_columns=16,
        )
        rows = float(-np.expm1(-job.samples * spec.pooling * spec.shares()).sum())
        made.append(table)
        reuse[table.path] = ZipfReuse(spec.pooling, job.samples, rows)
    return make_problem(Workload(made, reuse), job, costs)


def section(run: dict[str, Any]) -> str:
    """A row for each kind of job and seed."""
    rows = [
        [
            each["backend"],
            "training" if each["training"] else "inference",
            each["seed"],
            f"{each['seconds']:.1f}",
            f"{100 * (each['step_us'] / each['lower_bound_us'] - 1):.1f}",
        ]
        for each in run["results"]
    ]
    header = ["backend", "steps of", "seed", "seconds", "step over the lower bound, %"]
    return page.section(run, page.table(header, rows))


if __name__ == "__main__":
    main()
