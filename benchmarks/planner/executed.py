"""Plans of random models executed at 4 ranks: ours, TorchRec's, Table III's and random ones.

One training step of an EmbeddingBagCollection: forward, backward and the optimizer, which is fused
into the backward of sharded tables and comes after it for data-parallel ones. The slowest rank
counts. All plans of a model take turns step by step in the same processes, so that what the machine
does meanwhile hits all alike. Every model is kept, and the same command goes on where it stopped.
"""

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec_bls.sharding.problem.job import Job

from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks, slowest_ms
from benchmarks.harness.statistics import taking_turns
from benchmarks.planner.page import summarize
from benchmarks.planner.random_models import Task, batch_of, module_of, random_specs
from torchrec_bls import BLSEmbeddingBagCollectionSharder

_SHARDERS = {"gloo": EmbeddingBagCollectionSharder, "bls": BLSEmbeddingBagCollectionSharder}
_TABLES, _ROWS = (8, 20), (1e3, 2e5)
_RANKS, _BATCH, _BATCHES, _WARM_UPS = 4, 256, 4, 3
_DDR = 64 << 30
_LEARNING_RATE = 0.01


def main() -> None:
    parser = record.parser(__doc__)
    parser.set_defaults(json=Path("out/sharding_executed.json"))
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each plan")
    parser.add_argument("--seconds", type=float, default=380, help="after which no model is begun")
    parser.add_argument("--profile", default="epyc-milan-2-cores", help="file or name")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    empty = {"benchmark": "sharding_executed", "environment": record.environment()}
    settings = {"steps": options.steps, "profile": options.profile}
    empty |= {"settings": {"ranks": _RANKS, "batch": _BATCH, **settings}, "results": []}
    kept = record.Resumable(options.json, empty, summarize)
    done = len(kept.raw["results"])
    for model, backend in list(product(range(options.models), _SHARDERS))[done:]:
        if time.monotonic() > end:
            break
        result = on_ranks(_RANKS, _measure, model, backend, *settings.values())
        kept.add({"model": model, "backend": backend, **result})
        print(model, backend, {n: float(np.median(p["ms"])) for n, p in result["plans"].items()})


def _measure(rank: int, model: int, backend: str, steps: int, profile: str) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    specs = random_specs(model, _TABLES, _ROWS)
    sharder = _SHARDERS[backend](fused_params={"learning_rate": _LEARNING_RATE})
    cores = len(os.sched_getaffinity(0))
    job = Job(_RANKS, _BATCH, [_DDR] * _RANKS, backend=backend, cores_per_host=cores)
    task = Task(specs, sharder, job, profile)
    ids = [batch_of(specs, _BATCH, 1000 * model + 10 * index + rank) for index in range(_BATCHES)]
    how: Any = {"sharders": task.sharders, "device": torch.device("cpu")}
    steppers, found = {}, {}
    for name, plan in task.plans(model).items():
        sharded = DistributedModelParallel(module_of(specs), plan=plan, **how)
        steppers[name] = partial(step_ms, sharded, optimizer_of(sharded), cycle(ids))
        types = {parameter.sharding_type for parameter in dict(plan.plan[""]).values()}
        found[name] = {"predicted_us": None, "sharding": sorted(types)}
        with suppress(ValueError):  # data-parallel tables can't be rated
            found[name]["predicted_us"] = vars(task.rating(plan).step)
    taking_turns(steppers, _WARM_UPS)
    for name, ms in taking_turns(steppers, steps).items():
        found[name]["ms"] = ms
    return {"tables": len(specs), "plans": found}


def optimizer_of(model: DistributedModelParallel) -> CombinedOptimizer:
    """Returns what a training loop steps: the fused optimizer, and SGD for what is not fused."""
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizers = [model.fused_optimizer]
    if parameters:  # no plan of ours has any, a data-parallel table is one
        sgd = partial(torch.optim.SGD, lr=_LEARNING_RATE)
        optimizers.append(KeyedOptimizerWrapper(parameters, sgd))
    return CombinedOptimizer(optimizers)


def step_ms(
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    batches: Iterator[KeyedJaggedTensor],
) -> float:
    """Trains on the next batch, and returns the milliseconds of that on the slowest rank."""
    batch = next(batches)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).values().sum().backward()
        optimizer.step()

    return slowest_ms(step)


if __name__ == "__main__":
    main()
