"""Records: a summary as JSON, one line a result, and the raw samples beside it, as bzip2."""

import argparse
import bz2
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrec_bls.sharding.costs.machine import this_machine

from benchmarks import ROOT
from benchmarks.harness.statistics import Spread

RESULTS = ROOT / "benchmarks" / "results"
_RECORDS = ("benchmarks/results", "benchmarks/raw")
# Significant ones, of everything and of samples.
_DIGITS, _SAMPLE_DIGITS = 5, 4
_LINE = 400

Record = dict[str, Any]


class RecordError(SystemExit):
    """A record cannot be used; the text says what to run, and is what a program ends with."""


def parser(description: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """The command line that benchmarks share: --json, and --quick where `quick` describes it."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", type=Path, help="write the record to this file, samples beside it")
    if quick is not None:
        made.add_argument("--quick", action="store_true", help=quick)
    return made


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, date and command of this run."""
    machine = this_machine()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": _commit(),
        "cpu": machine.cpu,
        "cores": machine.cores,
        "memory_gib": round(machine.memory_bytes / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": machine.versions,
    }


def publish(
    path: Path | None,
    benchmark: str,
    started_in: dict[str, Any],
    settings: Any,
    results: Any,
    section: Callable[[Record], str],
) -> None:
    """Prints the page's section of a run, and writes the run and its samples if there is a `path`.

    `started_in` is `environment()` from before the run, when its own load did not count yet. The
    samples have each `Spread` of the results as the list of its samples.
    """
    head = {"benchmark": benchmark, "environment": started_in, "settings": settings}
    record = {**head, "results": results}
    print(section(record))
    if path is not None:
        if _walk(results, summarized=False) != _walk(results, summarized=True):
            write_raw(raw_path(path), record)
        write_summary(path, record)


def write_summary(path: Path, record: Record) -> None:
    _replace(path, (_outlined(_walk(record, summarized=True)) + "\n").encode())


class Resumable:
    """A record that is written after each result, so that a stopped run goes on where it was.

    `raw` has all samples: what an earlier run left at `raw_path(path)`, or else `empty`, which has
    no results yet. `summarize` makes the summary of it, also of one that has not ended. With
    "settings" in `empty`, samples of other settings are a RecordError.
    """

    def __init__(self, path: Path, empty: Record, summarize: Callable[[Record], Record]) -> None:
        self._path, self._summarize = path, summarize
        samples = raw_path(path)
        self.raw: Record = read_raw(samples) if samples.exists() else empty
        found, wanted = self.raw.get("settings"), empty.get("settings")
        if found != wanted:
            raise RecordError(
                f"{samples} has the settings {found}, not {wanted}: remove it, or write to "
                "another file"
            )

    def add(self, result: Any) -> None:
        self.raw["results"].append(result)
        self.write()

    def write(self) -> None:
        """Writes samples and summary."""
        write_raw(raw_path(self._path), self.raw)
        write_summary(self._path, self._summarize(self.raw))


def read(path: Path, command: str = "") -> Record:
    """Reads a summary; a RecordError says that it is missing or no record with results."""
    how = f": write it with `{command} --json {path}`" if command else ""
    try:
        record: Record = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecordError(f"{path} is missing{how}") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path} is no JSON ({error}){how}") from None
    if not (record.get("results") or record.get("stages")):
        raise RecordError(f"{path} holds no results{how}")
    return record


def raw_path(path: Path) -> Path:
    """Where the samples of a record lie: of results/x.json in raw/x.json.bz2, else beside it."""
    if path.parent.name == RESULTS.name:
        return path.parent.parent / "raw" / f"{path.name}.bz2"
    return path.with_name(f"{path.stem}.raw.json.bz2")


def write_raw(path: Path, tree: Any) -> None:
    """Writes a packed JSON file whose bytes depend on `tree` alone."""
    text = json.dumps(_walk(tree, summarized=False), separators=(",", ":"))
    _replace(path, bz2.compress(text.encode()))


def read_raw(path: Path) -> Any:
    """Reads what `write_raw` has written."""
    return json.loads(bz2.decompress(path.read_bytes()))


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _outlined(value: Any) -> str:
    """JSON in lines: what is short on one, of the rest each entry on its own."""
    line = json.dumps(value, separators=(",", ":"))
    if len(line) <= _LINE or not isinstance(value, (list, dict)):
        return line
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(_outlined, value)) + "\n]"
    entries = (f"{json.dumps(key)}:{_outlined(each)}" for key, each in value.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def _walk(tree: Any, summarized: bool, digits: int = _DIGITS) -> Any:
    if isinstance(tree, Spread):
        kept = dict(tree) if summarized else tree.values_in_order
        return _walk(kept, summarized, _SAMPLE_DIGITS)
    if isinstance(tree, dict):
        return {key: _walk(value, summarized, digits) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_walk(value, summarized, digits) for value in tree]
    return float(f"{tree:.{digits}g}") if isinstance(tree, float) else tree


def _commit() -> str | None:
    """The commit, and whether more than records differs from it: several may be taken in a row."""
    git = ["git", "-C", str(ROOT)]
    status = [*git, "status", "--porcelain", "--untracked-files=no"]
    no_records = ["--", ".", *(f":!{path}" for path in _RECORDS)]
    try:
        commit = _output([*git, "rev-parse", "--short=12", "HEAD"])
        return f"{commit} with local changes" if _output([*status, *no_records]) else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _output(command: list[str]) -> str:
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
