"""Lookups of a reader while another process publishes new weights, again and again."""

import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy import stats
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from tqdm import tqdm

from benchmarks.direct.page import switches_section
from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.modules.models import FEATURES, Case, ids_of
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, publish, version_of

# 1.3 GB of tables, all of which the publisher owns.
FULL = {"rows": 200_000, "dim": 64, "batch": 128, "publications": 20, "pause_s": 1.0}
QUICK = {"rows": 2_000, "dim": 64, "batch": 128, "publications": 2, "pause_s": 0.2}

_READER, _PUBLISHER = 0, 1
_BATCHES = 50
_DEADLINE_S = 60.0


def measure(rank: int, settings: dict[str, Any]) -> dict[str, Any] | None:
    module = _sharded(settings)
    case = Case("EBC", "table_wise", 2, settings["batch"], rows=settings["rows"])
    batches = [ids_of(case, rank, seed) for seed in range(_BATCHES)]
    _fill(module, 1)
    with torch.no_grad():
        module(batches[0]).wait()
        if rank == _READER:
            return _read(module, batches, settings)
        for number in tqdm(range(settings["publications"]), unit="publication"):
            dist.barrier()
            _copy(module, settings["pause_s"])
            _fill(module, number + 2)  # new weights come from somewhere before they are published
            dist.barrier()
            publish(module, version=str(number + 2)).wait(_DEADLINE_S)
            module(batches[0]).wait()  # its weights show what serves before they are written to
        dist.barrier()
    return None


# What the other process does during lookups: nothing; copies of its tables, the load of a
# publication without a switch; publications.
_PHASES = ("idle", "copying", "switching")


def _read(module: Any, batches: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Times all lookups by phase, in ms."""
    times: dict[str, list[list[float]]] = {phase: [] for phase in _PHASES}
    number = 0

    def look_up(phase: str) -> None:
        nonlocal number
        begin = time.perf_counter()
        values = module(batches[number % _BATCHES]).wait().values()
        times[phase][-1].append((time.perf_counter() - begin) * 1e3)
        number += 1
        version = version_of(module)
        if not (values == _number_of(version)).all():
            raise RuntimeError(f"lookup {number} is not of version {version}")

    def look_up_for(seconds: float, phase: str) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            look_up(phase)

    for publication in range(settings["publications"]):
        for each in times.values():
            each.append([])
        for phase in _PHASES[:2]:
            look_up_for(settings["pause_s"], phase)
            dist.barrier()
        # Without tables of its own this announces and no more, in a thread as a server would.
        version = str(publication + 2)
        own = threading.Thread(target=publish, args=(module,), kwargs={"version": version})
        own.start()
        while version_of(module) != version:
            look_up("switching")
        own.join()
        # The old version is unmapped beside the first batches of the new one.
        look_up_for(settings["pause_s"] / 4, "switching")
    dist.barrier()
    return {
        "phases": {phase: _quantiles(np.concatenate(of)) for phase, of in times.items()},
        "over_idle_p99": _ratio(times["idle"], 0.99, times["switching"]),
        "over_copying_p99_9": _ratio(times["copying"], 0.999, times["switching"]),
    }


def _quantiles(times: Any) -> dict[str, float]:
    quantiles = {"median": 0.5, "p99": 0.99, "p99_9": 0.999}
    found = {name: float(np.quantile(times, at)) for name, at in quantiles.items()}
    return {"lookups": len(times), **found}


def _ratio(
    without: list[list[float]], quantile: float, during: list[list[float]]
) -> tuple[float, float, float]:
    """p99.9 during switches over a quantile without, with its 95 % interval by bootstrap over
    switches."""

    def ratio(switches: Any) -> float:
        before, beside = (np.concatenate([w[i] for i in switches]) for w in (without, during))
        return float(np.quantile(beside, 0.999) / np.quantile(before, quantile))

    every = np.arange(len(without))
    found = stats.bootstrap(
        (every,), ratio, n_resamples=1000, method="percentile", vectorized=False, rng=0
    ).confidence_interval
    return float(found.low), ratio(every), float(found.high)


def _copy(module: Any, seconds: float) -> None:
    """Copies the tables of this rank again and again, as a publication does once."""
    shards = [t.local_shards()[0].tensor for t in module.state_dict().values()]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for shard in shards:
            shard.clone()


def _sharded(settings: dict[str, Any]) -> Any:
    sizes = {"num_embeddings": settings["rows"], "embedding_dim": settings["dim"]}
    tables = [
        EmbeddingBagConfig(name=f"table_{i}", feature_names=[feature], **sizes)
        for i, feature in enumerate(FEATURES)
    ]
    module = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    sharder = BLSEmbeddingBagCollectionSharder(config=BLSConfig(lookup="direct"))
    kernel = EmbeddingComputeKernel.FUSED.value
    where = {table.name: table_wise(rank=_PUBLISHER, compute_kernel=kernel) for table in tables}
    plan = construct_module_sharding_plan(
        module, where, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan, env, torch.device("cpu"), "switched")


def _number_of(version: str) -> int:
    return int(version) if version.isdigit() else 1  # before the first publication


def _fill(module: Any, number: int) -> None:
    """Makes all weights of this rank the number of their version, by which outputs tell it."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            for shard in tensor.local_shards():
                shard.tensor.fill_(float(number))


def main() -> None:
    arguments = record.parser(__doc__, quick="small tables, 2 publications").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results = [on_ranks(2, measure, settings)]
    record.publish(arguments.json, "direct_switches", before, settings, results, switches_section)


if __name__ == "__main__":
    main()
