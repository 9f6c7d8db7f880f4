"""Sharded embedding modules, forward only: bounded lag at bound 0 against TorchRec on gloo.

Per rank: 26 tables of 20,000 rows, dimension 64, one id a feature, one thread. Each sample times a
few forwards back to back on every rank and counts the slowest; the two are timed in turn. The
lookup alone, timed the same way on ids that are already there, is the limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import environment, spread, write_json
from embedding_models import Case, build, ids_of
from embedding_report import print_table, write_plot
from tqdm import tqdm

FORWARDS_PER_SAMPLE = 5


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        ranks: process counts.
        batches: samples per rank and forward.
        samples: timings of each variant.
    """

    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    samples: int


def cases(settings: Settings, ranks: int) -> list[Case]:
    """All combinations that are measured with `ranks` processes."""
    kinds = itertools.product(("EC", "EBC"), ("table_wise", "row_wise"), settings.batches)
    return [Case(module, sharding, ranks, batch) for module, sharding, batch in kinds]


def slowest(work: Callable[[], object]) -> float:
    """Milliseconds per call of `work` on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(FORWARDS_PER_SAMPLE):
        work()
    elapsed = torch.tensor((time.perf_counter() - start) / FORWARDS_PER_SAMPLE * 1e3)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def measure(rank: int, folder: str, settings: Settings, ranks: int) -> None:
    """Runs one rank over all cases; rank 0 leaves the results in `folder`."""
    torch.set_num_threads(1)
    store = f"{Path(folder).as_uri()}/rendezvous-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    results = []
    todo = cases(settings, ranks)
    with torch.no_grad(), tqdm(todo, disable=rank != 0, desc=f"{ranks} ranks") as bar:
        for case in bar:
            ids = ids_of(case, rank)
            torchrec, ours, lookup = build(case, ids)
            for _ in range(3):
                torchrec()
                ours()
            samples: dict[str, list[float]] = {"torchrec": [], "ours": [], "lookup": []}
            for _ in range(settings.samples):
                samples["torchrec"].append(slowest(torchrec))
                samples["ours"].append(slowest(ours))
                samples["lookup"].append(slowest(lookup))
            times = {name: spread(values) for name, values in samples.items()}
            results.append({**asdict(case), "ms": times})
    if rank == 0:
        (Path(folder) / f"{ranks}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measures, prints the table, writes JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/benchmarks/embedding.json"))
    parser.add_argument("--quick", action="store_true", help="few samples, 2 ranks, batch 512")
    arguments = parser.parse_args()
    settings = Settings((2,), (512,), 3) if arguments.quick else Settings((2, 4), (512, 2048), 15)
    started_in = environment()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in settings.ranks:
            mp.spawn(measure, (folder, settings, ranks), nprocs=ranks)
            results += json.loads((Path(folder) / f"{ranks}.json").read_text())
    write_json(arguments.json, "embedding", started_in, asdict(settings), results)
    print_table(results)
    write_plot(arguments.json.with_suffix(".png"), results)


if __name__ == "__main__":
    main()
