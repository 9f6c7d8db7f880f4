"""Bounded-lag DLRM inference on one host, checked against TorchRec and timed.

The program spawns the ranks itself. DistributedModelParallel shards a DLRM with 26 tables in
Criteo's shape. TorchRec's own sharders on gloo come first, then bounded-lag sharders at each bound,
then direct reads. Weights, batches and random delays are always the same. Every logit is compared.
The table goes to the terminal and, with a plot, into the output folder.

    python -m benchmarks.demo.run --data train.txt --bounds 0 1 2 4 8
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.demo.bounded_lag import bounded_lag
from benchmarks.demo.direct_reads import direct_reads
from benchmarks.demo.measure import MEASURED, measure
from benchmarks.demo.plot import write_plot
from benchmarks.demo.report import format_slowest, format_table, write_json, write_waiting
from benchmarks.demo.settings import Settings
from benchmarks.demo.summary import summarize, wrong_results
from benchmarks.demo.variants import Variant, torchrec_on_gloo
from torchrec_bls import processes
from torchrec_bls.datasets import CriteoDataset


def parse_arguments(arguments: list[str] | None = None) -> tuple[Settings, Path]:
    """Reads the command line; a wrong value ends the program with a message."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="Criteo rows: train.txt or a CSV with a header")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="output folder")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=100, help="batches of a run")
    parser.add_argument("--runs", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument("--batch", type=int, default=128, help="rows of a rank's batch")
    parser.add_argument("--max-delay-ms", type=float, default=10.0, help="delays are 0 to this")
    parser.add_argument("--straggler", type=int, metavar="RANK", help="rank with doubled delays")
    parser.add_argument("--embedding-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in ("ranks", "steps", "runs", "batch", "embedding_dim"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, at least 1")
    if not 0 <= options.max_delay_ms < float("inf"):
        parser.error(f"--max-delay-ms is {options.max_delay_ms}, expected 0 or more")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}, expected 0 or more")
    if options.straggler is not None and not 0 <= options.straggler < options.ranks:
        parser.error(f"--straggler is {options.straggler}, expected a rank of {options.ranks}")
    if min(options.bounds) < 0 or len(set(options.bounds)) < len(options.bounds):
        parser.error(f"--bounds are {options.bounds}, expected different bounds of 0 or more")
    settings = Settings(
        data=options.data,
        ranks=options.ranks,
        bounds=tuple(options.bounds),
        steps=options.steps,
        runs=options.runs,
        batch=options.batch,
        max_delay=options.max_delay_ms / 1e3,
        embedding_dim=options.embedding_dim,
        seed=options.seed,
        straggler=options.straggler,
    )
    return settings, options.out


def make_variants(settings: Settings) -> list[Variant]:
    """Returns TorchRec as the reference, then each bound in the given order, then direct reads."""
    return [
        torchrec_on_gloo(),
        *(bounded_lag(bound, settings.batch) for bound in settings.bounds),
        direct_reads(),
    ]


def deadline_s(settings: Settings) -> float:
    """Returns far more than a run takes: ten minutes, and a second a batch beyond its delay."""
    batches = (2 + len(settings.bounds)) * settings.runs * settings.steps
    return 600.0 + batches * (1.0 + 2 * settings.max_delay)


def main() -> int:
    """Runs the demo; returns the exit status, 0 if every result is right."""
    settings, out = parse_arguments()
    if settings.data is not None:
        try:
            CriteoDataset(settings.data, rows_per_table=settings.rows_per_table, batch_size=1)
        except (OSError, ValueError) as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dlrm-demo-") as folder:
        try:
            processes.run(
                settings.ranks,
                measure,
                Path(folder),
                settings,
                make_variants,
                deadline_s=deadline_s(settings),
                start_method="spawn",
            )
        except processes.RanksFailedError as failure:
            print(f"demo: {failure}", file=sys.stderr)
            return 1
        lines = [summarize(entry) for entry in json.loads((Path(folder) / MEASURED).read_text())]
    rows = settings.data.name if settings.data else "generated rows"
    subtitle = (
        f"{settings.ranks} ranks, {rows}, {settings.batch} rows a rank, "
        f"delays 0 to {1e3 * settings.max_delay:g} ms"
        + ("" if settings.straggler is None else f" (twice on rank {settings.straggler})")
    )
    cores = len(os.sched_getaffinity(0))
    if cores < settings.ranks:
        subtitle += f"; {cores} cores, so ranks wait for cores as well"
    run = f"{subtitle}, {settings.runs} runs of {settings.steps} batches"
    print(f"\n{run}\n")
    print(format_table(lines))
    print(format_slowest(lines))
    write_waiting(out / "waiting.txt", lines, run)
    write_json(out / "demo.json", lines, settings)
    write_plot(out / "demo.png", lines, subtitle)
    print(f"\nWritten: demo.json, demo.png and waiting.txt in {out}")
    problems = wrong_results(lines)
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    if not problems:
        print("All logits are TorchRec's, bit for bit, at every bound and with direct reads.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
