"""Summary and tables of the record of the paper's evaluation."""

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

from benchmarks.harness import page
from benchmarks.harness.statistics import mean_interval

Stage = dict[str, Any]

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


def summarize(raw: dict[str, Any]) -> dict[str, Any]:
    """The record of all stages: runs as their mean with its interval."""
    stages = {
        name: {**stage, "results": [_summarized(entry) for entry in stage["results"]]}
        for name, stage in raw["stages"].items()
    }
    return {**raw, "stages": stages}


def _summarized(entry: dict[str, Any]) -> dict[str, Any]:
    if "step_ms" in entry:
        steps, results = entry["step_ms"], entry["result_ms"]
        return {
            "backend": entry["backend"],
            "bound": entry["bound"],
            "step_ms": mean_interval([fmean(run) for run in steps]),
            # Sec. V-C: the sum over the ranks, whose batches are different ones.
            "batches_per_s": mean_interval([sum(1e3 / ms for ms in run) for run in steps]),
            "result_ms": mean_interval([fmean(run) for run in results]),
        }
    if "ms_per_step" in entry:
        return {**entry, "ms_per_step": mean_interval(entry["ms_per_step"])}
    return {
        key: {peer: mean_interval(runs) for peer, runs in each.items()}
        if isinstance(each, dict)
        else each
        for key, each in entry.items()
    }


def section(record: dict[str, Any]) -> str:
    """Markdown of all stages that are there."""
    makers: dict[str, tuple[str, Callable[[Stage], Iterator[list[str]]]]] = {
        "fig6a": ("Fig. 6a: one call, µs", _sizes),
        "fig6b": ("Fig. 6b: calls one after the other, 32 KiB per pair, seconds", _repetitions),
        "fig7-delays": ("Fig. 7, delays 0-10 ms, dense part a sleep of 5 ms: ms a step", _windows),
        "fig7-sizes": ("Fig. 7, messages of 2-200 KiB and nothing else: ms a step", _windows),
        "fig7-dlrm-delays": ("Fig. 7, plain DLRM, delays 0-10 ms: ms a batch", _dlrm),
        "fig7-dlrm-ids": ("Fig. 7, plain DLRM, 1-100 ids a table: ms a batch", _dlrm),
        "fig8": ("Fig. 8, plain DLRM, balanced rows, no delays: ms a batch", _dlrm),
        "table1": ("Table I, measured", _overlaps),
    }
    stages, parts = record["stages"], []
    for figure, (title, rows) in makers.items():
        for name in sorted(name for name in stages if name.rpartition("-")[0] == figure):
            header, *lines = rows(stages[name])
            parts += [
                f"### {title}, {name.rpartition('-')[2]} ranks",
                page.table(header, lines),
                page.conditions(stages[name]),
            ]
    return "\n\n".join(parts)


def _sizes(stage: Stage) -> Iterator[list[str]]:
    yield ["per pair", *_ALLTOALL.values()]
    for entry in stage["results"]:
        yield [page.size(entry["bytes"]), *(_interval(entry["us"].get(peer)) for peer in _ALLTOALL)]


def _repetitions(stage: Stage) -> Iterator[list[str]]:
    yield ["calls", *_ALLTOALL.values()]
    for entry in stage["results"]:
        cells = (_interval(entry["seconds"].get(peer)) for peer in _ALLTOALL)
        yield [f"{entry['repetitions']:,}", *cells]


def _windows(stage: Stage) -> Iterator[list[str]]:
    found = {(entry["peer"], entry["bound"]): entry for entry in stage["results"]}
    peers = [peer for peer in _PEERS if (peer, stage["settings"]["bounds"][0]) in found]
    yield ["bound", "ideal, computed", *(_PEERS[peer] for peer in peers)]
    for bound in stage["settings"]["bounds"]:
        ideal = found[peers[0], bound]["computed_ideal_ms"]
        cells = (_interval(found[peer, bound]["ms_per_step"]) for peer in peers)
        yield [str(bound), f"{ideal:.2f}" if ideal else "", *cells]


def _dlrm(stage: Stage) -> Iterator[list[str]]:
    found = {(entry["backend"], entry["bound"]): entry for entry in stage["results"]}
    backends = [name for name in _PEERS if (name, stage["settings"]["bounds"][0]) in found]
    names = [_PEERS[backend].removeprefix("backend ") for backend in backends]
    titles = [f"{name}: step" for name in names] + [f"{name}: batches/s" for name in names]
    yield ["bound", *titles, "bls: to the logits"]
    for bound in stage["settings"]["bounds"]:
        kinds = ("step_ms", "batches_per_s")
        cells = [_interval(found[backend, bound][kind]) for kind in kinds for backend in backends]
        yield [str(bound), *cells, _interval(found["bls", bound]["result_ms"])]


def _overlaps(stage: Stage) -> Iterator[list[str]]:
    entries = stage["results"]
    titles = [
        f"{'BLS DLRM' if entry['bound'] else 'DLRM'}, "
        f"{_PEERS[entry['backend']].removeprefix('backend ')}, k = {entry['bound']}"
        for entry in entries
    ]
    yield ["overlaps", *titles]
    for key, title in _OVERLAPS.items():
        cells = []
        for entry in entries:
            if key in ("exchanges", "one_sided"):
                yes, of = int(entry[key]) > (key == "exchanges"), f" of {entry['bound'] + 1}"
            else:
                # Other load makes trials miss an overlap and can't make one up.
                yes, of = bool(entry[key]), f"/{entry['trials']}"
            cells.append(f"{'yes' if yes else 'no'} ({int(entry[key])}{of})")
        yield [title, *cells]


def _interval(found: dict[str, float] | None) -> str:
    if not found:
        return "-"
    mean = found["mean"]
    digits = max(0, 2 - max(0, len(str(int(mean))) - 1)) if mean >= 0.1 else 5
    return f"{mean:,.{digits}f} ± {found['ci95']:,.{digits}f}"
