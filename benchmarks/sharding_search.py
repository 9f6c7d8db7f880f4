"""How good plans are and how long planning takes, ours and TorchRec's, on one core.

Generated problems from 20 tables on 4 ranks to 1,000 on 128. Each plan is rated by the same costs:
the predicted step against a proven lower bound (docs/design/planner.md). TorchRec's planner
has the same constraints and statistics as far as it takes them, a process and a time of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from common import environment, write_json
from sharding_costs import costs_of
from sharding_models import ZipfReuse, module_of, random_specs

SIZES = ((20, 4), (100, 16), (300, 32), (1000, 128))
BATCH = 512
_ROWS = (1e3, 2e6)
_DDR = 1 << 38


def main() -> None:
    """Plans all problems and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("out/sharding-search.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--profile", help="whose costs to plan with; crude ones without")
    parser.add_argument("--torchrec-seconds", type=float, default=120.0)
    options = parser.parse_args()
    started_in = environment()
    results = []
    print(f"{'tables x ranks':>14} {'planner':>9} {'seconds':>8} {'MiB':>6} {'over bound':>10}")
    for tables, ranks in SIZES:
        for seed in range(options.seeds):
            for planner, seconds in (("ours", 300.0), ("torchrec", options.torchrec_seconds)):
                if planner == "torchrec" and seed:
                    continue
                arguments = (planner, tables, ranks, seed, options.profile)
                result = _in_a_process(_plan, arguments, seconds)
                results.append(
                    {"planner": planner, "tables": tables, "ranks": ranks, "seed": seed, **result}
                )
                over = result.get("over_bound")
                print(
                    f"{f'{tables} x {ranks}':>14} {planner:>9} {result['seconds']:>8.2f} "
                    f"{result.get('peak_mib', 0):>6.0f} "
                    + (f"{over:>10.2%}" if over is not None else f"{result['failure']:>10}")
                )
    settings = {"batch": BATCH, "seeds": options.seeds, "profile": options.profile}
    write_json(options.json, "sharding_search", started_in, settings, results)


def _in_a_process(work: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
    """Returns what `work` sends, or that it took longer than `seconds`."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sending, *arguments))
    process.start()
    try:
        # Imports take a while that is no planning.
        if receiving.poll(seconds + 60):
            return json.loads(receiving.recv_bytes())
        return {"seconds": seconds, "failure": "no result"}
    finally:
        process.kill()
        process.join()


def _plan(
    answer: Connection, planner: str, tables: int, ranks: int, seed: int, profile: str | None
) -> None:
    import logging

    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec_bls.sharding.job import Job
    from torchrec_bls.sharding.options import make_problem
    from torchrec_bls.sharding.planner import BLSShardingPlanner
    from torchrec_bls.sharding.rating import rate
    from torchrec_bls.sharding.search import search
    from torchrec_bls.sharding.torchrec_plan import from_sharding_plan
    from torchrec_bls.sharding.torchrec_tables import workload_of

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
    topology = Topology(world_size=ranks, compute_device="cpu", ddr_cap=_DDR)
    costs = costs_of(profile)
    if planner == "ours":
        ours = BLSShardingPlanner(
            topology, BATCH, constraints=constraints, costs=costs, reuse=reuse, backend="gloo"
        )
        plan_with = ours.plan
    else:
        theirs = EmbeddingShardingPlanner(topology, BATCH, constraints=constraints, debug=False)
        plan_with = theirs.plan
    start = time.perf_counter()
    plan = plan_with(module, [sharder])
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    job = Job(ranks, BATCH, [_DDR] * ranks, backend="gloo")
    workload = workload_of(module, [sharder], "cpu", 1, constraints, reuse)
    bound = search(make_problem(workload, job, costs)).lower_bound
    step = rate(from_sharding_plan(plan, workload), workload, job, costs).step.microseconds
    record = {
        "seconds": seconds,
        "peak_mib": peak,
        "step_us": step,
        "lower_bound_us": bound,
        "over_bound": step / bound - 1,
    }
    answer.send_bytes(json.dumps(record).encode())
    sys.exit(0)


if __name__ == "__main__":
    main()
