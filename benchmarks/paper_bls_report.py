"""Tables of the record of paper_bls, and the page that shows them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import ROOT, mean_interval
from paper_bls_figures import draw

BEGIN = "<!-- results: written by benchmarks/paper_bls_report.py -->"
END = "<!-- end of results -->"

Stages = dict[str, Any]

_ALLTOALL = {"channel": "channel, C++", "open_mpi": "Open MPI, C", "bls": "bls", "gloo": "gloo"}
_PEERS = {
    "shm": "channel, shm",
    "c10d": "channel, c10d",
    "bls": "backend bls",
    "gloo": "backend gloo",
    "mpi": "Open MPI",
}
_OVERLAPS = {
    "same_iteration": "compute and collective in the same iteration",
    "other_iteration": "compute and collective across iterations",
    "exchanges": "collective and collective across iterations",
    "one_sided": "sent to a rank that posts later, sender stopped",
}


def tables(stages: Stages) -> str:
    """Markdown of all stages that are there."""
    makers: dict[str, tuple[str, Callable[[Any], Iterator[str]]]] = {
        "fig6a": ("Fig. 6a: one call, µs", _sizes),
        "fig6b": ("Fig. 6b: calls one after the other, 32 KiB per pair, seconds", _repetitions),
        "fig7-delays": ("Fig. 7, delays 0-10 ms, dense part a sleep of 5 ms: ms a step", _windows),
        "fig7-sizes": ("Fig. 7, messages of 2-200 KiB and nothing else: ms a step", _windows),
        "fig7-dlrm-delays": ("Fig. 7, plain DLRM, delays 0-10 ms: ms a batch", _dlrm),
        "fig7-dlrm-ids": ("Fig. 7, plain DLRM, 1-100 ids a table: ms a batch", _dlrm),
        "fig8": ("Fig. 8, plain DLRM, balanced rows, no delays: ms a batch", _dlrm),
        "table1": ("Table I, measured", _overlaps),
    }
    lines: list[str] = []
    for figure, (title, table) in makers.items():
        for name in sorted(name for name in stages if name.rpartition("-")[0] == figure):
            stage = stages[name]
            lines += ["", f"### {title}, {name.rpartition('-')[2]} ranks", ""]
            lines += [*table(stage), "", _origin(stage)]
    return "\n".join(lines).strip()


def _sizes(stage: Any) -> Iterator[str]:
    yield from _header("per pair", *_ALLTOALL.values())
    for entry in stage["results"]:
        cells = (_interval(entry["us"].get(peer)) for peer in _ALLTOALL)
        yield _row(_size(entry["bytes"]), *cells)


def _repetitions(stage: Any) -> Iterator[str]:
    yield from _header("calls", *_ALLTOALL.values())
    for entry in stage["results"]:
        cells = (_interval(entry["seconds"].get(peer)) for peer in _ALLTOALL)
        yield _row(f"{entry['repetitions']:,}", *cells)


def _windows(stage: Any) -> Iterator[str]:
    found = {(entry["peer"], entry["bound"]): entry for entry in stage["results"]}
    peers = [peer for peer in _PEERS if (peer, stage["settings"]["bounds"][0]) in found]
    yield from _header("bound", "ideal, computed", *(_PEERS[peer] for peer in peers))
    for bound in stage["settings"]["bounds"]:
        ideal = found[peers[0], bound]["computed_ideal_ms"]
        cells = (_interval(found[peer, bound]["ms_per_step"]) for peer in peers)
        yield _row(str(bound), f"{ideal:.2f}" if ideal else "", *cells)


def _dlrm(stage: Any) -> Iterator[str]:
    found = {(entry["backend"], entry["bound"]): entry for entry in stage["results"]}
    backends = [name for name in _PEERS if (name, stage["settings"]["bounds"][0]) in found]
    names = [_PEERS[backend].removeprefix("backend ") for backend in backends]
    titles = [f"{name}: step" for name in names]
    yield from _header("bound", *titles, *(f"{n}: batches/s" for n in names), "bls: to the logits")
    for bound in stage["settings"]["bounds"]:
        entries = [found[backend, bound] for backend in backends]
        steps = [_interval([fmean(run) for run in entry["step_ms"]]) for entry in entries]
        # Sec. V-C: the sum over the ranks, whose batches are different ones.
        rates = [
            _interval([sum(1e3 / ms for ms in run) for run in entry["step_ms"]])
            for entry in entries
        ]
        result = _interval([fmean(run) for run in found["bls", bound]["result_ms"]])
        yield _row(str(bound), *steps, *rates, result)


def _overlaps(stage: Any) -> Iterator[str]:
    entries = stage["results"]
    titles = [
        f"{'BLS DLRM' if entry['bound'] else 'DLRM'}, "
        f"{_PEERS[entry['backend']].removeprefix('backend ')}, k = {entry['bound']}"
        for entry in entries
    ]
    yield from _header("overlaps", *titles)
    for key, title in _OVERLAPS.items():
        cells = []
        for entry in entries:
            if key in ("exchanges", "one_sided"):
                count = int(entry[key])
                yes = count > (key == "exchanges")
                cells.append(f"{'yes' if yes else 'no'} ({count} of {entry['bound'] + 1})")
            else:
                # Other load makes trials miss an overlap and can't make one up.
                yes = "yes" if entry[key] else "no"
                cells.append(f"{yes} ({entry[key]}/{entry['trials']})")
        yield _row(title, *cells)


def _interval(samples: Sequence[float] | None) -> str:
    if not samples:
        return "-"
    found = mean_interval(samples)
    mean = found["mean"]
    digits = max(0, 2 - max(0, len(str(int(mean))) - 1)) if mean >= 0.1 else 5
    return f"{mean:,.{digits}f} ± {found['ci95']:,.{digits}f}"


def _size(size: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


def _header(*titles: str) -> Iterator[str]:
    yield _row(*titles)
    yield _row(*["---"] * len(titles))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _origin(stage: Any) -> str:
    where = stage["environment"]
    return (
        f"*{where['cpu']}, {where['cores']} cores, load {where['load_average']} before, "
        f"torch {where['versions']['torch']}, commit {where['commit']}, {where['date'][:10]}*"
    )


def main() -> int:
    """Puts tables and figures of the committed record into docs/reproduction/bls.md."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--record", type=Path, default=ROOT / "benchmarks" / "results" / "paper_bls.json"
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reproduction" / "bls.md")
    options = parser.parse_args()
    stages = json.loads(options.record.read_text())["stages"]
    before, begin, rest = options.page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{options.page} needs the lines {BEGIN} and {END}, in this order", file=sys.stderr)
        return 1
    options.page.write_text(f"{before}{BEGIN}\n\n{tables(stages)}\n\n{END}{after}")
    draw(options.page.parent, stages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
