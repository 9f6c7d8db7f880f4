"""Who was late in recorded jobs, and what a bound would save: what traces say beside the truth.

Inference of a model with sharded tables on 4 ranks, over gloo and over bounded-lag channels at
bound 0, recorded by `record_step`. First one rank sleeps in each step, while it loads or in its
dense part: the traces have to name it. Then all ranks sleep for random times: the recorded job is
replayed with bounds, and measured with them. What was recorded over gloo is replayed over channels,
by a profile.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.simulation.recorded.over_channels import over_channels
from torchrec_bls.sharding.simulation.recorded.replay import replay
from tqdm import tqdm

from benchmarks.delays.exchanges import draw_delays
from benchmarks.harness import page, record
from benchmarks.harness.launch import gathered, on_ranks, slowest_ms
from benchmarks.harness.statistics import share_interval, taking_turns
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, BoundedLagPipeline
from torchrec_bls.observe import record_step
from torchrec_bls.observe.traces.lateness import lateness_of
from torchrec_bls.observe.traces.read_job import read_job, traces_in

RANKS, BOUNDS = 4, (0, 1, 2, 4)
BACKENDS, PLACES = ("gloo", "bls"), ("loading", "dense part")
_TABLES, _ROWS, _DIM, _BATCH = 8, 20_000, 64, 128
_LATE_S, _STEPS = 0.02, 20
_LONGEST_S, _DENSE_S = 0.01, 0.005
_SEED = 17


class Model(nn.Module):
    """Sharded tables, and a dense part that sleeps as long as `held_up` says for each batch."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(_ROWS, _DIM, f"t{number}", feature_names=[f"f{number}"])
            for number in range(_TABLES)
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables)
        self.dense = Sleep()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.dense(self.embeddings(batch.sparse_features).values())


class Sleep(nn.Module):
    """Stands for work on another device: it takes no core."""

    held_up: Iterator[float] = iter(())

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        time.sleep(next(self.held_up, _DENSE_S))
        return embeddings.sum(dim=1)


def main() -> None:
    parser = record.parser(__doc__, quick="one trial with one late rank, few steps")
    parser.set_defaults(json=Path("out/simulator_traced.json"))
    parser.add_argument("--profile", default="epyc-milan-2-cores", help="file or name")
    options = parser.parse_args()
    settings: dict[str, Any] = {"trials": 8, "late": RANKS, "steps": 100, "rounds": 3}
    if options.quick:
        settings = {"trials": 1, "late": 1, "steps": 10, "rounds": 1}
    settings["profile"] = options.profile
    before = record.environment()
    with TemporaryDirectory() as folder:
        results = on_ranks(RANKS, _measure, Path(folder), settings)
    record.publish(options.json, "simulator_traced", before, settings, results, section)


def _measure(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    models = {"gloo": _sharded(None), "bls": _sharded(0)}
    batches = [_batch(rank, number) for number in range(4)]
    # By what the recordings are of, how many name the late rank, and how many there are.
    named: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    cells = list(product(range(settings["trials"]), BACKENDS, PLACES, range(settings["late"])))
    for _, backend, place, late in tqdm(cells, desc="late ranks", disable=rank != 0):
        extra = [_LATE_S * (rank == late)] * _STEPS
        _record(models[backend], batches, folder, place, extra)
        if rank == 0:
            found = lateness_of(read_job(traces_in(folder))).slowest
            of_place = named[f"{backend}, {place}"]
            of_place[0] += found == late
            of_place[1] += 1
    return {"named": dict(named), "bounds": _bounds(rank, folder, models, batches, settings)}


def _bounds(
    rank: int, folder: Path, models: Any, batches: list[Batch], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Steps by the bound, measured over channels, and replayed from a recording over each."""
    steps, costs = settings["steps"], ProfiledCosts(load_profile(settings["profile"]))
    delays = draw_delays(_SEED, RANKS, steps, _LONGEST_S)[rank].tolist()
    pipelined = _sharded(max(BOUNDS))
    replayed = {}
    for backend, model in models.items():
        _record(model, batches, folder, "loading", delays)
        if rank == 0:
            recording = read_job(traces_in(folder)).recording
            if backend == "gloo":
                recording = over_channels(recording, costs)
            nothing = np.zeros((RANKS, steps))
            replayed[backend] = {k: replay(recording, k, nothing).step_us / 1e3 for k in BOUNDS}
    pipelines = {
        k: lambda k=k: slowest_ms(lambda: _run_pipeline(pipelined, k, batches, delays)) / steps
        for k in BOUNDS
    }
    taken = taking_turns(pipelines, settings["rounds"], "bounds")
    return [
        {"bound": k, "measured_ms": taken[k]}
        | {backend: of_backend[k] for backend, of_backend in replayed.items()}
        for k in BOUNDS
    ]


def _run_pipeline(
    model: nn.Module, bound: int, batches: list[Batch], delays: Sequence[float]
) -> None:
    pipeline = BoundedLagPipeline(model, bound)
    loaded = _loaded(batches, delays)
    with torch.no_grad():
        for _ in delays:
            pipeline.progress(loaded)


def _record(
    model: nn.Module, batches: list[Batch], folder: Path, place: str, extra: Sequence[float]
) -> None:
    """Records a step for each of `extra`, seconds for which this rank is held up at `place`."""
    in_dense = place == "dense part"
    with torch.no_grad():
        for batch in batches:
            model(batch)
        model.module.dense.held_up = iter([_DENSE_S + each for each in extra] if in_dense else [])
        dist.barrier()
        with record_step(folder) as end_of_step:
            for batch in _loaded(batches, [0.0] * len(extra) if in_dense else extra):
                model(batch)
                end_of_step()
    gathered(None)  # all have written


def _loaded(batches: list[Batch], delays: Iterable[float]) -> Iterator[Batch]:
    for number, delay in enumerate(delays):
        time.sleep(delay)
        yield batches[number % len(batches)]


def _sharded(bound: int | None) -> nn.Module:
    """The model over channels of this bound; without one over gloo, as TorchRec has it."""
    torch.manual_seed(0)
    sharder: Any = EmbeddingBagCollectionSharder()
    if bound is not None:
        sharder = BLSEmbeddingBagCollectionSharder(config=BLSConfig(bound=bound))
    how: Any = {"device": torch.device("cpu"), "sharders": [sharder], "init_data_parallel": False}
    return DistributedModelParallel(Model(), **how).eval()


def _batch(rank: int, number: int) -> Batch:
    random = torch.Generator().manual_seed(100 * rank + number)
    count = _BATCH * _TABLES
    ids = KeyedJaggedTensor(
        keys=[f"f{table}" for table in range(_TABLES)],
        values=torch.randint(0, _ROWS, (count,), generator=random),
        lengths=torch.ones(count, dtype=torch.int32),
    )
    return Batch(dense_features=torch.empty(0), sparse_features=ids, labels=torch.empty(0))


def section(run: dict[str, Any]) -> str:
    """How often the late rank was named, and steps by the bound."""
    rows = []
    for where, (right, count) in run["results"]["named"].items():
        low, high = share_interval(right, count)
        rows.append([where, f"{right} of {count} ({100 * low:.0f} to {100 * high:.0f} %)"])
    bounds = run["results"]["bounds"]
    first, steps = bounds[0], []
    for each in bounds:
        runs = each["measured_ms"]
        measured = np.median(runs) / np.median(first["measured_ms"])
        predicted = [each[name] / first[name] for name in BACKENDS]
        cells = [f"{share:.3f} ({100 * (share / measured - 1):+.1f} %)" for share in predicted]
        measured_ms = f"{np.median(runs):.2f} [{min(runs):.2f}-{max(runs):.2f}]"
        steps.append([each["bound"], measured_ms, f"{measured:.3f}", *cells])
    header = ["bound", "measured, ms", "over bound 0"]
    header += [f"replayed from {name}, over bound 0" for name in BACKENDS]
    return page.section(
        run,
        page.table(["recorded over, held up in", "the right rank was named"], rows),
        page.table(header, steps),
    )


if __name__ == "__main__":
    main()
