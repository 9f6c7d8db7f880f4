"""Compares this working tree with another checkout, in one run.

The trees take turns in random order, and each turn is a new process: where its memory lies changes
a time by more than most commits do. So does the place of its native code, which all processes share
that load the same file: each turn loads a fresh copy. All turns run this tree's benchmark, with
either's package.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torchrec_bls
from benchmarks import ROOT
from benchmarks.harness import page, record
from benchmarks.harness.statistics import Spread, geometric_mean, ratio_of_medians, taking_turns

#: By the name of a cell, its time in one turn.
Turn = dict[str, float]

_TURN_S = 900.0
_FIND_NATIVE = "import torchrec_bls._native as native; print(native.__file__)"


def main(name: str, turn: Callable[[], Turn], document: str, unit: str) -> None:
    """Compares the trees by what `turn` measures, and prints and records the ratios.

    Args:
        name: of the record. `benchmarks.<name>`'s module calls this function when it is run.
        turn: measures all cells once.
        document: of the benchmark, for its help.
        unit: of the times.
    """
    parser = record.parser(document)
    parser.add_argument("python", help="of the other checkout's .venv; - to take one turn alone")
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    if options.python == "-":
        print(json.dumps({"tree": str(_tree()), "cells": turn()}))
        return
    started_in = record.environment()
    pythons = {"old": options.python, "new": sys.executable}
    samplers = {which: partial(_taken, name, python) for which, python in pythons.items()}
    turns = taking_turns(samplers, options.turns, title="turns")
    trees = {which: {each["tree"] for each in of_tree} for which, of_tree in turns.items()}
    if trees["old"] & trees["new"] or trees["new"] != {str(ROOT)}:
        raise SystemExit(f"the packages of the turns are not those of two trees: {trees}")
    results = _ratios({which: [each["cells"] for each in of] for which, of in turns.items()})
    settings = {"turns": options.turns, "old": _commit(trees["old"].pop()), "unit": unit}
    section = partial(_section, unit=unit)
    record.publish(options.json, name.replace(".", "_"), started_in, settings, results, section)


def _taken(name: str, python: str) -> dict[str, Any]:
    """One turn of a tree, by its interpreter."""
    _place_native_code(Path(_last_line([python, "-c", _FIND_NATIVE])))
    taken: dict[str, Any] = json.loads(_last_line([python, "-m", f"benchmarks.{name}", "-"]))
    return taken


def _place_native_code(library: Path) -> None:
    """Has later processes load the library from other pages of memory.

    One of four copies of a library took 1.6 times as long as the others to sum rows of two blocks.
    Processes that have it loaded keep the former file.
    """
    copy = library.with_name(f"{library.name}.copy")
    shutil.copy2(library, copy)
    copy.replace(library)


def _last_line(command: list[str]) -> str:
    """What a program printed last. Ends the comparison if it fails."""
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_TURN_S, check=False
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr[-4000:]}")
    return ended.stdout.splitlines()[-1]


def _tree() -> Path:
    return Path(torchrec_bls.__file__).resolve().parents[1]


def _commit(tree: str) -> str:
    command = ["git", "-C", tree, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _ratios(turns: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    results = []
    for cell in turns["new"][0]:
        of = {which: [each[cell] for each in of_tree] for which, of_tree in turns.items()}
        low, ratio, high = ratio_of_medians(of["new"], of["old"])
        times = {which: Spread(samples) for which, samples in of.items()}
        results.append({"cell": cell, **times, "low": low, "ratio": ratio, "high": high})
    return results


def _section(measured: record.Record, unit: str) -> str:
    """The ratios of medians, new by old, with their 95 % intervals, and their geometric mean."""
    cells: Sequence[dict[str, Any]] = measured["results"]
    rows = [
        (
            each["cell"],
            f"{each['old']['median']:.3g}",
            f"{each['new']['median']:.3g}",
            f"{each['ratio']:.3f} ({each['low']:.3f} to {each['high']:.3f})",
        )
        for each in cells
    ]
    _, mean, _ = geometric_mean([each["ratio"] for each in cells])
    against = f"New by {measured['settings']['old']}; geometric mean {mean:.3f}:"
    table = page.table(["cell", f"old, {unit}", f"new, {unit}", "ratio"], rows)
    return page.section(measured, against, table)
