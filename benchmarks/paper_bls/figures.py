"""Figures of the paper's evaluation, with what the paper says beside the measurements.

The paper's curves are not at hand as numbers: what is drawn of it are the figures in its text.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import page

_STYLES = {
    "channel": ("ours, C++", "tab:blue", "o"),
    "shm": ("channel, shm", "tab:blue", "o"),
    "c10d": ("channel, c10d", "tab:cyan", "D"),
    "bls": ("backend bls", "tab:purple", "v"),
    "gloo": ("backend gloo", "tab:green", "^"),
    "open_mpi": ("Open MPI, C", "tab:red", "s"),
    "mpi": ("Open MPI", "tab:red", "s"),
}
#: Sec. VI-B1: ms a batch at bound 0 and at larger bounds, 8 nodes.
_PAPER_DELAYS = (17.0, 12.0)

Stage = dict[str, Any]
#: By peer the positions and the means with their intervals.
Series = dict[str, list[tuple[float, dict[str, float]]]]


def draw(folder: Path, record: dict[str, Any]) -> None:
    """Writes bls-fig6.png, bls-fig7.png and bls-fig8.png for the stages that are there."""
    figures: dict[str, dict[str, Callable[[Any, Stage], None]]] = {
        "bls-fig6.png": {"fig6a": _draw_sizes, "fig6b": _draw_repetitions},
        "bls-fig7.png": {
            "fig7-delays": _draw_delays,
            "fig7-dlrm-delays": _draw_dlrm,
            "fig7-sizes": _draw_windows,
            "fig7-dlrm-ids": _draw_dlrm,
        },
        "bls-fig8.png": {"fig8": _draw_dlrm},
    }
    stages = record["stages"]
    for file, panels in figures.items():
        there = [name.rpartition("-")[::2] for name in stages]
        kinds = [kind for kind in panels if any(figure == kind for figure, _ in there)]
        ranks = sorted({int(count) for figure, count in there if figure in panels})
        if not kinds:
            continue
        grid = {"nrows": len(ranks), "ncols": len(kinds)}
        with page.figure(folder / file, 4.6 * len(kinds), 3.6 * len(ranks), **grid) as (_, axes):
            for row, count in zip(axes, ranks, strict=True):
                for axis, kind in zip(row, kinds, strict=True):
                    axis.set_visible((name := f"{kind}-{count}") in stages)
                    if name in stages:
                        panels[kind](axis, stages[name])
                        axis.set_title(f"{kind}, {count} ranks", fontsize=9)
                        axis.grid(alpha=0.3)
                        axis.legend(fontsize=7)


def _draw_sizes(axis: Any, stage: Stage) -> None:
    results = stage["results"]
    _curves(axis, _by_peer((e["bytes"], e["us"]) for e in results))
    axis.set(xscale="log", yscale="log", xlabel="bytes per pair", ylabel="µs a call")
    axis.axvspan(results[0]["bytes"], 4096, alpha=0.08, color="tab:red")
    axis.axvspan(4096, results[-1]["bytes"], alpha=0.08, color="tab:blue")
    axis.text(0.03, 0.6, "paper:\nMPI faster", transform=axis.transAxes, fontsize=7)
    axis.text(0.7, 0.1, "paper:\nBLS faster", transform=axis.transAxes, fontsize=7)


def _draw_repetitions(axis: Any, stage: Stage) -> None:
    _curves(axis, _by_peer((e["repetitions"], e["seconds"]) for e in stage["results"]))
    axis.set(xscale="log", yscale="log", xlabel="calls of 32 KiB per pair", ylabel="seconds")
    note = "paper: BLS faster for 1 call,\n2-3 x slower than MPI for more"
    axis.text(0.4, 0.05, note, transform=axis.transAxes, fontsize=7)


def _draw_delays(axis: Any, stage: Stage) -> None:
    _draw_windows(axis, stage)
    ideals = {entry["bound"]: entry["computed_ideal_ms"] for entry in stage["results"]}
    axis.plot(range(len(ideals)), list(ideals.values()), "k:", label="ideal, computed")
    for value, label in zip(_PAPER_DELAYS, ("k = 0", "k > 0"), strict=True):
        axis.axhline(value, color="tab:gray", linewidth=0.8)
        axis.text(2, value, f"paper, {label}", fontsize=7, va="bottom")
    axis.set_ylim(0, max(axis.get_ylim()[1], 1.1 * max(_PAPER_DELAYS)))


def _draw_windows(axis: Any, stage: Stage) -> None:
    _by_bound(axis, stage, "peer", "ms_per_step", "ms a step")


def _draw_dlrm(axis: Any, stage: Stage) -> None:
    series = _by_bound(axis, stage, "backend", "step_ms", "ms a batch")
    # The paper's reference line: the original DLRM over the backend of comparison.
    _, reference = series.get("mpi", series["gloo"])[0]
    axis.axhline(reference["mean"], color="tab:gray", linestyle=":", label="k = 0, reference")


def _by_bound(axis: Any, stage: Stage, peer: str, figure: str, label: str) -> Series:
    bounds = stage["settings"]["bounds"]
    points = ((bounds.index(e["bound"]), {e[peer]: e[figure]}) for e in stage["results"])
    series = _by_peer(points)
    _curves(axis, series)
    page.bound_axis(axis, bounds, label)
    return series


def _by_peer(entries: Iterable[tuple[float, dict[str, dict[str, float]]]]) -> Series:
    series: Series = {}
    for position, peers in entries:
        for peer, interval in peers.items():
            series.setdefault(peer, []).append((position, interval))
    return series


def _curves(axis: Any, series: Series) -> None:
    for name, points in series.items():
        label, colour, marker = _STYLES[name]
        page.curve(axis, points, label=label, color=colour, marker=marker)
