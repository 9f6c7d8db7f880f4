"""Compares the all-to-all of this working tree with that of an earlier commit, in one run.

Programs take turns in random order, and each turn runs a fresh copy in memory: where its pages lie
changes the time of a small message by more than most commits do.
"""

import shutil
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

from tqdm import tqdm

from benchmarks import ROOT
from benchmarks.exchange import native
from benchmarks.harness import page, record
from benchmarks.harness.statistics import Spread, geometric_mean, ratio_of_medians, taking_turns

_SIZES = [8, 4 << 10, 32 << 10, 256 << 10, 4 << 20]
_PROGRAM = "channel_alltoall"


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="bytes for each peer")
    parser.add_argument("--pairs", type=int, default=30, help="of turns, for each cell")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each half of a turn")
    options = parser.parse_args()
    started_in = record.environment()
    programs = {"old": _program_of(options.commit), "new": native.build(_PROGRAM) / _PROGRAM}
    results = []
    for ranks, size in tqdm(list(product(options.ranks, options.sizes)), desc="cells"):
        how = ["--ranks", str(ranks), "--bytes", str(size), "--seconds", str(options.seconds)]
        samplers = {name: partial(_turn, program, how) for name, program in programs.items()}
        turns = taking_turns(samplers, options.pairs)
        for kind in ("one_shot", "train"):
            us = {name: [turn[kind] for turn in of_name] for name, of_name in turns.items()}
            low, ratio, high = ratio_of_medians(us["new"], us["old"])
            cell = {"ranks": ranks, "bytes": size, "kind": kind}
            cell |= {f"{name}_us": Spread(us[name]) for name in programs}
            results.append({**cell, "low": low, "ratio": ratio, "high": high})
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
    git = ["git", "-C", str(ROOT)]
    name = native.checked([*git, "rev-parse", "--short", "--verify", f"{commit}^0"]).strip()
    source = ROOT / "build" / f"hot-path-{name}"
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        native.checked([*git, "archive", "--output", archive.name, name])
        shutil.unpack_archive(archive.name, source, filter="data")
    return native.build(_PROGRAM, source) / _PROGRAM


def _turn(program: Path, how: list[str]) -> dict[str, float]:
    """Median microseconds of one-shot calls and of a train."""
    with tempfile.TemporaryDirectory(prefix="bls-hot-path-", dir="/dev/shm") as folder:
        return native.medians(native.checked([shutil.copy(program, folder), *how]))


if __name__ == "__main__":
    main()
