"""Summary, tables and figures of the record of the paper's evaluation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import page
from benchmarks.harness.statistics import difference_interval, mean_interval

Stage = dict[str, Any]
#: Of a table, the first one its header.
Rows = Iterator[Sequence[Any]]

#: Labels and looks; of the all-to-all alone there are others.
PEERS = {
    "shm": {"label": "channel, shm", "color": "tab:blue", "marker": "o"},
    "tcp": {"label": "channel, tcp", "color": "tab:orange", "marker": "P"},
    # In records from before the transport tcp: a channel over gloo's messages.
    "c10d": {"label": "channel, c10d", "color": "tab:cyan", "marker": "D"},
    "bls": {"label": "backend bls", "color": "tab:purple", "marker": "v"},
    "gloo": {"label": "backend gloo", "color": "tab:green", "marker": "^"},
    "mpi": {"label": "Open MPI", "color": "tab:red", "marker": "s"},
}
_STYLES = {
    **PEERS,
    "channel": {"label": "ours, C++", "color": "tab:blue", "marker": "o"},
    "open_mpi": {"label": "Open MPI, C", "color": "tab:red", "marker": "s"},
}
# Sec. VI-B1: ms a batch at bound 0 and at larger bounds, 8 nodes. The paper's curves are not at
# hand as numbers: what is drawn of it are the figures in its text.
_PAPER_DELAYS = {"k = 0": 17.0, "k > 0": 12.0}
_ALLTOALL = {"channel": "channel, C++", "open_mpi": "Open MPI, C", "bls": "bls", "gloo": "gloo"}
_WITH_BOUNDS = {
    "fig7-delays": "Fig. 7, delays, dense part a sleep",
    "fig7-dlrm-delays": "Fig. 7, delays, plain DLRM",
    "fig7-sizes": "Fig. 7, sizes: messages that differ",
    "fig7-dlrm-ids": "Fig. 7, sizes: lookups that differ",
    "fig8": "Fig. 8, balanced rows",
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
        return {
            "backend": entry["backend"],
            "bound": entry["bound"],
            "step_ms": mean_interval([fmean(run) for run in entry["step_ms"]]),
            # Sec. V-C: the sum over the ranks, whose batches are different ones.
            "batches_per_s": mean_interval([sum(1e3 / t for t in run) for run in entry["step_ms"]]),
            "result_ms": mean_interval([fmean(run) for run in entry["result_ms"]]),
        }
    return {key: _intervals(each) for key, each in entry.items()}


def _intervals(runs: Any) -> Any:
    if isinstance(runs, dict):
        return {peer: mean_interval(of_peer) for peer, of_peer in runs.items()}
    return mean_interval(runs) if isinstance(runs, list) else runs


def section(record: dict[str, Any]) -> str:
    """Markdown of all stages that are there."""
    makers: dict[str, tuple[str, Callable[[Stage], Rows]]] = {
        "fig6a": ("Fig. 6a: one call, µs", _sizes),
        "fig6b": ("Fig. 6b: calls one after the other, 32 KiB per pair, seconds", _repetitions),
        "fig7-delays": ("Fig. 7, delays 0-10 ms, dense part a sleep of 5 ms: ms a step", _windows),
        "fig7-sizes": ("Fig. 7, messages of 2-200 KiB and nothing else: ms a step", _windows),
        "fig7-dlrm-delays": ("Fig. 7, plain DLRM, delays 0-10 ms: ms a batch", _dlrm),
        "fig7-dlrm-ids": ("Fig. 7, plain DLRM, 1-100 ids a table: ms a batch", _dlrm),
        "fig8": ("Fig. 8, plain DLRM, balanced rows, no delays: ms a batch", _dlrm),
        "table1": ("Table I, measured", _overlaps),
    }
    parts = _gains(record["stages"])
    for figure, (title, rows) in makers.items():
        for name, stage in sorted(record["stages"].items()):
            of, _, ranks = name.rpartition("-")
            if of == figure:
                header, *lines = rows(stage)
                heading = f"### {title}, {ranks} ranks"
                parts.append(page.section(stage, heading, page.table(header, lines)))
    return "\n\n".join(parts)


def _gains(stages: dict[str, Stage]) -> list[str]:
    """One rule for Figs. 7 and 8: what the largest bound changes of a step at bound 0."""
    lines, compared, bounds = [], 0, set()
    for figure, title in _WITH_BOUNDS.items():
        for name, stage in sorted(stages.items()):
            of, _, ranks = name.rpartition("-")
            if of != figure:
                continue
            kind = "step_ms" if "step_ms" in stage["results"][0] else "ms_per_step"
            times, runs = by_bound(stage, kind), stage["settings"]["runs"]
            last = max(times)
            changes = {
                peer: _change(difference_interval(times[last][peer], old, runs), old["mean"])
                for peer, old in times[0].items()
            }
            compared, bounds = compared + len(changes), bounds | {last}
            lines.append((title, ranks, changes))
    if not lines:
        return []
    bound = " or ".join(map(str, sorted(bounds)))
    peers = [peer for peer in PEERS if any(peer in of for _, _, of in lines)]
    header = ["", "ranks", *(PEERS[peer]["label"] for peer in peers)]
    rows = [[title, n, *(of.get(peer, "-") for peer in peers)] for title, n, of in lines]
    rule = (
        f"A step at bound {bound}, over one at bound 0, with the 95 % interval of the difference "
        "by Welch's t over the runs. **Bold**: the whole interval is on one side of 0. If no bound "
        f"changed anything, {compared * 0.05:.0f} of these {compared} intervals would be expected "
        "to be so by chance."
    )
    return ["### What a bound changes, by one rule", rule, page.table(header, rows)]


def _change(interval: tuple[float, float, float], of: float) -> str:
    low, change, high = (100 * each / of for each in interval)
    text = f"{change:+.0f} % ({low:+.0f} to {high:+.0f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def by_bound(stage: Stage, kind: str) -> dict[int, dict[str, Any]]:
    """What the results have as `kind`, by bound and then by peer."""
    found: dict[int, dict[str, Any]] = {}
    for entry in stage["results"]:
        peer = entry.get("peer") or entry["backend"]
        found.setdefault(entry["bound"], {})[peer] = entry[kind]
    return found


def _sizes(stage: Stage) -> Rows:
    yield ["per pair", *_ALLTOALL.values(), "bls / Open MPI"]
    for entry in stage["results"]:
        us = entry["us"]
        both = "bls" in us and "open_mpi" in us
        over = f"{us['bls']['mean'] / us['open_mpi']['mean']:.1f}" if both else "-"
        yield [page.size(entry["bytes"]), *_cells(us, _ALLTOALL), over]


def _repetitions(stage: Stage) -> Rows:
    yield ["calls", *_ALLTOALL.values()]
    for entry in stage["results"]:
        yield [f"{entry['repetitions']:,}", *_cells(entry["seconds"], _ALLTOALL)]


def _windows(stage: Stage) -> Rows:
    times, ideals = by_bound(stage, "ms_per_step"), by_bound(stage, "computed_ideal_ms")
    peers = [peer for peer in PEERS if peer in times[0]]
    yield ["bound", "ideal, computed", *(PEERS[peer]["label"] for peer in peers)]
    for bound, of_bound in times.items():
        ideal = ideals[bound][peers[0]]
        yield [bound, f"{ideal:.2f}" if ideal else "", *_cells(of_bound, peers)]


def _dlrm(stage: Stage) -> Rows:
    steps, rates, waits = (by_bound(stage, k) for k in ("step_ms", "batches_per_s", "result_ms"))
    peers = [peer for peer in PEERS if peer in steps[0]]
    titles = [f"{_backend(peer)}: {kind}" for kind in ("step", "batches/s") for peer in peers]
    yield ["bound", *titles, "bls: to the logits"]
    for bound in steps:
        cells = [*_cells(steps[bound], peers), *_cells(rates[bound], peers)]
        yield [bound, *cells, *_cells(waits[bound], ["bls"])]


def _overlaps(stage: Stage) -> Rows:
    columns = [["overlaps", *_OVERLAPS.values()]]
    for entry in stage["results"]:
        bound, model = entry["bound"], "BLS DLRM" if entry["bound"] else "DLRM"
        column = [f"{model}, {_backend(entry['backend'])}, k = {bound}"]
        for key in _OVERLAPS:
            # Of trials: other load makes them miss an overlap and can't make one up. Of exchanges.
            of = f"/{entry['trials']}" if "iteration" in key else f" of {bound + 1}"
            yes = int(entry[key]) > (1 if key == "exchanges" else 0)
            column.append(f"{'yes' if yes else 'no'} ({int(entry[key])}{of})")
        columns.append(column)
    yield from zip(*columns, strict=True)


def _backend(peer: str) -> str:
    return PEERS[peer]["label"].removeprefix("backend ")


def _cells(found: dict[str, Any], peers: Iterable[str]) -> list[str]:
    return [_interval(**found[peer]) if peer in found else "-" for peer in peers]


def _interval(mean: float, ci95: float) -> str:
    digits = max(0, 3 - len(str(int(mean)))) if mean >= 0.1 else 5
    return f"{mean:,.{digits}f} ± {ci95:,.{digits}f}"


def draw(folder: Path, record: dict[str, Any]) -> None:
    """Writes bls-fig6.png, bls-fig7.png and bls-fig8.png for the stages that are there."""
    figures = {
        "bls-fig6.png": {"fig6a": _draw_sizes, "fig6b": _draw_repetitions},
        "bls-fig7.png": {
            "fig7-delays": _draw_delays,
            "fig7-dlrm-delays": _draw_dlrm,
            "fig7-sizes": _draw_windows,
            "fig7-dlrm-ids": _draw_dlrm,
        },
        "bls-fig8.png": {"fig8": _draw_dlrm},
    }
    stages = {name.rpartition("-")[::2]: stage for name, stage in record["stages"].items()}
    for file, panels in figures.items():
        kinds = [kind for kind in panels if any(kind == figure for figure, _ in stages)]
        counts = sorted({ranks for figure, ranks in stages if figure in panels}, key=int)
        if not kinds:
            continue
        grid = {"nrows": len(counts), "ncols": len(kinds)}
        with page.figure(folder / file, 4.6 * len(kinds), 3.6 * len(counts), **grid) as (_, axes):
            for axis, (count, kind) in zip(axes.flat, product(counts, kinds), strict=True):
                axis.set_visible((kind, count) in stages)
                if (kind, count) in stages:
                    panels[kind](axis, stages[kind, count])
                    axis.set_title(f"{kind}, {count} ranks", fontsize=9)
                    axis.grid(alpha=0.3)
                    axis.legend(fontsize=7)


def _draw_sizes(axis: Any, stage: Stage) -> None:
    results = stage["results"]
    page.curves(axis, ((entry["bytes"], entry["us"]) for entry in results), _STYLES)
    axis.set(xscale="log", yscale="log", xlabel="bytes per pair", ylabel="µs a call")
    axis.axvspan(results[0]["bytes"], 4096, alpha=0.08, color="tab:red")
    axis.axvspan(4096, results[-1]["bytes"], alpha=0.08, color="tab:blue")
    axis.text(0.03, 0.6, "paper:\nMPI faster", transform=axis.transAxes, fontsize=7)
    axis.text(0.7, 0.1, "paper:\nBLS faster", transform=axis.transAxes, fontsize=7)


def _draw_repetitions(axis: Any, stage: Stage) -> None:
    calls = ((entry["repetitions"], entry["seconds"]) for entry in stage["results"])
    page.curves(axis, calls, _STYLES)
    axis.set(xscale="log", yscale="log", xlabel="calls of 32 KiB per pair", ylabel="seconds")
    note = "paper: BLS faster for 1 call,\n2-3 x slower than MPI for more"
    axis.text(0.4, 0.05, note, transform=axis.transAxes, fontsize=7)


def _draw_delays(axis: Any, stage: Stage) -> None:
    _draw_windows(axis, stage)
    ideals = [max(peers.values()) for peers in by_bound(stage, "computed_ideal_ms").values()]
    axis.plot(ideals, "k:", label="ideal, computed")
    for label, value in _PAPER_DELAYS.items():
        axis.axhline(value, color="tab:gray", linewidth=0.8)
        axis.text(2, value, f"paper, {label}", fontsize=7, va="bottom")
    axis.set_ylim(0, max(axis.get_ylim()[1], 1.1 * max(_PAPER_DELAYS.values())))


def _draw_windows(axis: Any, stage: Stage) -> None:
    page.curves_by_bound(axis, by_bound(stage, "ms_per_step"), _STYLES, "ms a step")


def _draw_dlrm(axis: Any, stage: Stage) -> None:
    times = by_bound(stage, "step_ms")
    page.curves_by_bound(axis, times, _STYLES, "ms a batch")
    # The paper's reference line: the original DLRM over the backend of comparison.
    reference = times[0].get("mpi", times[0]["gloo"])["mean"]
    axis.axhline(reference, color="tab:gray", linestyle=":", label="k = 0, reference")
