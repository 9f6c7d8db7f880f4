"""Records: a summary as JSON, one line a result, and the raw samples beside it, gzipped."""

import argparse
import datetime
import gzip
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness.statistics import Spread

RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "torchrec-bls", "numpy")
# Significant ones, of everything and of samples.
_DIGITS, _SAMPLE_DIGITS = 6, 4
_LINE = 400

Record = dict[str, Any]


class RecordError(Exception):
    """A record cannot be used; the text says what to run."""


def parser(description: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """The command line that benchmarks share: --json, and --quick where `quick` describes it."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", type=Path, help="write the record to this file, samples beside it")
    if quick is not None:
        made.add_argument("--quick", action="store_true", help=quick)
    return made


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, date and command of this run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *_command(sys.argv)]),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def publish(
    path: Path | None,
    benchmark: str,
    started_in: dict[str, Any],
    settings: Any,
    results: Any,
    section: Callable[[Record], str],
) -> None:
    """Prints the page's section of a run, and writes its record if there is a `path`."""
    record = {"environment": started_in, "settings": settings, "results": results}
    print(section(record))
    if path is not None:
        write(path, benchmark, started_in, settings, results)


def write(
    path: Path, benchmark: str, started_in: dict[str, Any], settings: Any, results: Any
) -> None:
    """Writes one run as `{benchmark, environment, settings, results}`, and its samples.

    `started_in` is `environment()` from before the run, when its own load did not count yet. The
    summary has what is in `results`; the samples have each `Spread` as the list of its samples.
    """
    head = {"benchmark": benchmark, "environment": started_in, "settings": settings}
    samples = _walk(results, summarized=False)
    if samples != _walk(results, summarized=True):
        write_raw(raw_path(path), {**head, "results": samples})
    write_summary(path, {**head, "results": results})


def write_summary(path: Path, record: Record) -> None:
    """Writes a record, rounded."""
    _replace(path, (_outlined(_walk(record, summarized=True)) + "\n").encode())


class Resumable:
    """A record that is written after each result, so that a stopped run goes on where it was.

    Attributes:
        raw: the record with all samples: what an earlier run left, or what this one starts with.
    """

    def __init__(self, path: Path, empty: Record, summarize: Callable[[Record], Record]) -> None:
        """Reads the samples of the record `path`, if they are there.

        Args:
            path: of the summary; the samples lie at `raw_path(path)`.
            empty: the record without results. With "settings", samples of others are refused.
            summarize: makes the summary of `raw`, also of one that has not ended.

        Raises:
            RecordError: the samples have other settings.
        """
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
        """Appends to the results, and writes."""
        self.raw["results"].append(result)
        self.write()

    def write(self) -> None:
        """Writes samples and summary."""
        write_raw(raw_path(self._path), self.raw)
        write_summary(self._path, self._summarize(self.raw))


def read(path: Path, command: str = "") -> Record:
    """Reads the summary of one benchmark.

    Raises:
        RecordError: it is missing, or no record with results.
    """
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
    """Where the samples of a record lie: of results/x.json in raw/x.json.gz, else beside it."""
    if path.parent.name == RESULTS.name:
        return path.parent.parent / "raw" / f"{path.name}.gz"
    return path.with_name(f"{path.stem}.raw.json.gz")


def write_raw(path: Path, tree: Any) -> None:
    """Writes a gzipped JSON file whose bytes depend on `tree` alone."""
    text = json.dumps(_walk(tree, summarized=False), separators=(",", ":"))
    _replace(path, gzip.compress(text.encode(), 9, mtime=0))


def read_raw(path: Path) -> Any:
    """Reads what `write_raw` has written."""
    return json.loads(gzip.decompress(path.read_bytes()))


def pin_to_core(rank: int) -> None:
    """Pins this process round-robin to one of the cores it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _outlined(value: Any) -> str:
    """JSON in lines: what is short on one, of the rest each entry on its own."""
    line = json.dumps(value)
    if len(line) <= _LINE or not isinstance(value, (list, dict)):
        return line
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(_outlined, value)) + "\n]"
    entries = (f"{json.dumps(key)}: {_outlined(each)}" for key, each in value.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def _walk(tree: Any, summarized: bool, digits: int = _DIGITS) -> Any:
    if isinstance(tree, Spread) and not summarized:
        return _walk(tree.values_in_order, summarized, _SAMPLE_DIGITS)
    if isinstance(tree, dict):
        return {key: _walk(value, summarized, digits) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_walk(value, summarized, digits) for value in tree]
    return float(f"{tree:.{digits}g}") if isinstance(tree, float) else tree


def _command(argv: Sequence[str]) -> list[str]:
    script = Path(argv[0]).resolve()
    if not script.is_relative_to(ROOT):
        return [script.name, *argv[1:]]
    return ["-m", ".".join(script.relative_to(ROOT).with_suffix("").parts), *argv[1:]]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head} with local changes" if changed else head


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
