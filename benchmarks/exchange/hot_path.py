"""Compares the all-to-all of this working tree with that of an earlier commit, in one run.

Programs take turns in random order, and each turn runs a fresh copy in memory: where its pages lie
changes the time of a small message by more than most commits do.
"""

import io
import random
import shutil
import subprocess
import tarfile
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import ROOT
from benchmarks.exchange.native import build_program, medians
from benchmarks.harness import page, record
from benchmarks.harness.statistics import Spread, geometric_mean, ratio_of_medians

_SIZES = [8, 4 << 10, 32 << 10, 256 << 10, 4 << 20]
_BUILD = ROOT / "build/bench"
_LIMIT_SECONDS = 150


def main() -> None:
    """Measures every cell and prints the ratios of medians, new by old."""
    parser = record.parser(__doc__)
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="bytes for each peer")
    parser.add_argument("--pairs", type=int, default=30, help="of turns, for each cell")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each half of a turn")
    options = parser.parse_args()
    started_in = record.environment()
    programs = {"old": _program_of(options.commit), "new": build_program(ROOT, _BUILD)}
    results = []
    cells = list(product(options.ranks, options.sizes))
    in_memory = tempfile.TemporaryDirectory(prefix="bls-hot-path-", dir="/dev/shm")
    with tqdm(total=len(cells) * options.pairs, desc="pairs") as bar, in_memory as folder:
        for ranks, size in cells:
            turns: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
            for _ in range(options.pairs):
                for name in random.sample(list(programs), 2):
                    arguments = ("--ranks", ranks, "--bytes", size, "--seconds", options.seconds)
                    turns[name].append(_turn(programs[name], folder, *map(str, arguments)))
                bar.update()
            for kind in ("one_shot", "train"):
                us = {f"{name}_us": Spread([t[kind] for t in turns[name]]) for name in programs}
                interval = ratio_of_medians(
                    *(us[f"{n}_us"].values_in_order for n in ("new", "old"))
                )
                ratio = dict(zip(("low", "ratio", "high"), interval, strict=True))
                results.append({"ranks": ranks, "bytes": size, "kind": kind, **us, **ratio})
    settings = {"commit": options.commit, "pairs": options.pairs, "seconds": options.seconds}
    record.publish(options.json, "hot_path", started_in, settings, results, section)


def section(measured: record.Record) -> str:
    """The ratios of medians, new by old, with their 95 % intervals, and their geometric mean."""
    results = measured["results"]
    sizes = list(dict.fromkeys(cell["bytes"] for cell in results))
    rows: dict[tuple[int, str], list[str]] = {}
    for cell in results:
        text = f"{cell['ratio']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})"
        rows.setdefault((cell["ranks"], cell["kind"].replace("_", "-")), []).append(text)
    mean = geometric_mean([cell["ratio"] for cell in results])[1] if len(results) > 1 else 1.0
    table = page.table(
        ["ranks", "", *map(page.size, sizes)],
        [[str(ranks), kind, *cells] for (ranks, kind), cells in rows.items()],
    )
    against = f"New by {measured['settings']['commit']}; geometric mean {mean:.3f}:"
    return page.section(measured, against, table)


def _program_of(commit: str) -> Path:
    """Builds the commit in a folder of its own, which stays for the next run."""
    name = _git("rev-parse", "--short", "--verify", f"{commit}^{{commit}}").decode().strip()
    source = ROOT / "build" / f"hot-path-{name}"
    with tarfile.open(fileobj=io.BytesIO(_git("archive", name))) as files:
        files.extractall(source, filter="data")
    return build_program(source, source / "build/bench")


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _turn(program: Path, folder: str, *arguments: str) -> dict[str, float]:
    """Median microseconds of one-shot calls and of a train."""
    copy = Path(shutil.copy(program, f"{folder}/program-{random.getrandbits(40)}"))
    try:
        how: Any = {"check": True, "capture_output": True, "timeout": _LIMIT_SECONDS}
        done = subprocess.run([str(copy), *arguments], text=True, **how)
    finally:
        copy.unlink()
    return medians(done.stdout)


if __name__ == "__main__":
    main()
