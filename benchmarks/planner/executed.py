"""Plans of random models executed at 4 ranks: ours, TorchRec's, Table III's and random ones.

One training step of an EmbeddingBagCollection: forward, backward and the optimizer, which is fused
into the backward of sharded tables and comes after it for data-parallel ones. The slowest rank
counts. All plans of a model are in the same processes and take turns step by step, so that what
the machine does meanwhile hits all alike. Every model is kept as soon as it is done: the same
command goes on where it stopped.
"""

import itertools
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.report.prediction import rate
from torchrec_bls.sharding.torchrec.plan import from_sharding_plan, to_sharding_plan
from torchrec_bls.sharding.torchrec.planner import BLSShardingPlanner
from torchrec_bls.sharding.torchrec.tables import workload_of

from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks, slowest
from benchmarks.planner.page import summarize
from benchmarks.planner.paper_sharders import TABLE_III, random_plan, table_iii_plan
from benchmarks.planner.random_models import TableSpec, ZipfReuse, batch_of, module_of, random_specs
from torchrec_bls import BLSEmbeddingBagCollectionSharder

BACKENDS = ("gloo", "bls")
_TABLES, _ROWS = (8, 20), (1e3, 2e5)
_BATCHES, _WARM_UPS = 4, 3
_DDR = 64 << 30
_LEARNING_RATE = 0.01


def main() -> None:
    """Runs what is missing in the record, for as long as it may."""
    parser = record.parser(__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each plan")
    parser.add_argument("--seconds", type=float, default=380, help="after which no model is begun")
    parser.add_argument("--profile", default="epyc-milan-2-cores", help="file or name")
    options = parser.parse_args()
    path = options.json or Path("out/sharding_executed.json")
    settings = {name: getattr(options, name) for name in ("ranks", "batch", "steps", "profile")}
    known = {"benchmark": "sharding_executed", "environment": record.environment()}
    known |= {"settings": settings, "results": []}
    raw = record.raw_path(path)
    if raw.exists():
        known = record.read_raw(raw)
        if known["settings"] != settings:
            raise SystemExit(f"{raw} has other settings: {known['settings']}")
    end = time.monotonic() + options.seconds
    done = {(result["model"], result["backend"]) for result in known["results"]}
    for model, backend in itertools.product(range(options.models), BACKENDS):
        if (model, backend) not in done and time.monotonic() < end:
            specs = random_specs(model, _TABLES, _ROWS)
            result = on_ranks(options.ranks, _measure, specs, model, backend, settings)
            known["results"].append({"model": model, "backend": backend, **result})
            record.write_raw(raw, known)
            record.write_summary(path, summarize(known))
            plans = known["results"][-1]["plans"].items()
            print(model, backend, {name: np.median(plan["ms"]) for name, plan in plans})


def _measure(
    rank: int, specs: list[TableSpec], model: int, backend: str, settings: dict[str, Any]
) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    ranks, batch = settings["ranks"], settings["batch"]
    module = module_of(specs)
    fused = {"learning_rate": _LEARNING_RATE}
    sharders = {"bls": BLSEmbeddingBagCollectionSharder, "gloo": EmbeddingBagCollectionSharder}
    sharder = sharders[backend](fused_params=fused)
    topology = Topology(world_size=ranks, compute_device="cpu", ddr_cap=_DDR)
    reuse = {f"t{index}": ZipfReuse(spec, batch * ranks) for index, spec in enumerate(specs)}
    workload = workload_of(module, [sharder], "cpu", 1, reuse=reuse)
    cores = len(os.sched_getaffinity(0))
    job = Job(ranks, batch, [_DDR] * ranks, backend=backend, cores_per_host=cores)
    costs = ProfiledCosts(load_profile(settings["profile"]))
    pooling = [ParameterConstraints(pooling_factors=[spec.pooling]) for spec in specs]
    constraints = {f"t{index}": each for index, each in enumerate(pooling)}
    known = {"costs": costs, "reuse": reuse, "backend": backend, "cores_per_host": cores}
    ours = BLSShardingPlanner(topology, batch, **known)
    theirs = EmbeddingShardingPlanner(topology, batch, constraints=constraints, debug=False)
    plans = {
        "ours": ours.collective_plan(module, [sharder]),
        "torchrec": theirs.collective_plan(module, [sharder]),
        "random options": to_sharding_plan(random_plan(workload, job, model), topology),
    }
    for name in TABLE_III:
        plans[name] = to_sharding_plan(table_iii_plan(name, workload, job, model), topology)
    predicted = {}
    for name, plan in plans.items():
        try:
            predicted[name] = rate(from_sharding_plan(plan, workload), workload, job, costs).step
        except ValueError:
            predicted[name] = None  # data-parallel tables

    batches = [
        batch_of(specs, batch, 1000 * model + 10 * index + rank) for index in range(_BATCHES)
    ]
    how: Any = {"sharders": [sharder], "device": torch.device("cpu")}
    models = {
        name: DistributedModelParallel(module_of(specs), plan=plan, **how)
        for name, plan in plans.items()
    }
    optimizers = {name: optimizer_of(model) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    order = np.random.default_rng(model)
    for step in range(_WARM_UPS + settings["steps"]):
        names = list(models)
        order.shuffle(names)
        for name in names:
            elapsed = step_ms(models[name], optimizers[name], batches[step % _BATCHES])
            if step >= _WARM_UPS:
                times[name].append(elapsed)
    return {
        "tables": len(specs),
        "plans": {
            name: {
                "ms": samples,
                "predicted_us": vars(predicted[name]) if predicted[name] else None,
                "sharding": sorted({p.sharding_type for p in dict(plans[name].plan[""]).values()}),
            }
            for name, samples in times.items()
        },
    }


def optimizer_of(model: DistributedModelParallel) -> CombinedOptimizer:
    """Returns what a training loop steps: the fused optimizer, and SGD for what is not fused."""
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizers = [model.fused_optimizer]
    if parameters:  # no plan of ours has any, a data-parallel table is one
        optimizers.append(
            KeyedOptimizerWrapper(parameters, lambda each: torch.optim.SGD(each, _LEARNING_RATE))
        )
    return CombinedOptimizer(optimizers)


def step_ms(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, batch: KeyedJaggedTensor
) -> float:
    """Makes a training step, and returns its milliseconds on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    model(batch).values().sum().backward()
    optimizer.step()
    return slowest((time.perf_counter() - start) * 1e3)


if __name__ == "__main__":
    main()
