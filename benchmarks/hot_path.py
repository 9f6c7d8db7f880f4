"""Compares the all-to-all of this working tree with that of an earlier commit, in one run.

Programs take turns in random order, and each turn runs a fresh copy in memory: where its pages lie
changes the time of a small message by more than most commits do.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from alltoall_native import build_program
from common import ROOT, environment, write_json
from tqdm import tqdm

_SIZES = [8, 4 << 10, 32 << 10, 256 << 10, 4 << 20]
_RESAMPLES = 2000
_LIMIT_SECONDS = 150


def main() -> None:
    """Measures every cell and prints the ratios of medians, new by old."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="bytes for each peer")
    parser.add_argument("--pairs", type=int, default=30, help="of turns, for each cell")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each half of a turn")
    parser.add_argument("--json", type=Path, help="write the whole record to this file")
    options = parser.parse_args()
    started_in = environment()
    programs = {
        "old": _program_of(options.commit),
        "new": build_program(ROOT, ROOT / "build/bench"),
    }
    results = []
    cells = list(product(options.ranks, options.sizes))
    with tqdm(total=len(cells) * options.pairs, desc="pairs") as bar, _fresh_copies() as folder:
        for ranks, size in cells:
            turns: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
            for _ in range(options.pairs):
                for name in random.sample(list(programs), 2):
                    arguments = ("--ranks", ranks, "--bytes", size, "--seconds", options.seconds)
                    turns[name].append(_turn(programs[name], folder, *map(str, arguments)))
                bar.update()
            for kind in ("one_shot", "train"):
                samples = {name: [turn[kind] for turn in turns[name]] for name in programs}
                results.append({"ranks": ranks, "bytes": size, "kind": kind, **_compare(samples)})
                tqdm.write(_line(results[-1]))
    if options.json:
        settings = {"commit": options.commit, "pairs": options.pairs, "seconds": options.seconds}
        write_json(options.json, "hot_path", started_in, settings, results)


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


@contextmanager
def _fresh_copies() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(prefix="bls-hot-path-", dir="/dev/shm") as folder:
        yield Path(folder)


def _turn(program: Path, folder: Path, *arguments: str) -> dict[str, float]:
    """Median microseconds of one-shot calls and of a train."""
    copy = Path(shutil.copy(program, folder / f"program-{random.getrandbits(40)}"))
    try:
        done = subprocess.run(
            [str(copy), *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
        )
    finally:
        copy.unlink()
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {kind: measured[kind]["median_us"] for kind in ("one_shot", "train")}


def _compare(samples: dict[str, list[float]]) -> dict[str, float]:
    """The ratio of medians with its 95 % interval by bootstrap."""
    rng = np.random.default_rng(0)
    shape = (_RESAMPLES, len(samples["old"]))
    old, new = (np.median(rng.choice(samples[name], shape), axis=1) for name in ("old", "new"))
    low, high = np.quantile(new / old, [0.025, 0.975])
    medians = {f"{name}_us": statistics.median(of) for name, of in samples.items()}
    return {
        **medians,
        "ratio": medians["new_us"] / medians["old_us"],
        "low": float(low),
        "high": float(high),
    }


def _line(cell: dict[str, Any]) -> str:
    return (
        f"{cell['ranks']} ranks {cell['bytes']:>8} B {cell['kind']:<8} "
        f"{cell['old_us']:>10.2f} {cell['new_us']:>10.2f} us  "
        f"{cell['ratio']:.3f} ({cell['low']:.3f} to {cell['high']:.3f})"
    )


if __name__ == "__main__":
    main()
