"""Figures of the paper's evaluation, with what the paper says beside the measurements.

The paper's curves are not at hand as numbers: what is drawn of it are the figures in its text.
"""

from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.delays.page import draw_by_bound, draw_curves
from benchmarks.harness import page
from benchmarks.paper_bls.page import PEERS, Stage, by_bound

_STYLES = {
    **PEERS,
    "channel": {"label": "ours, C++", "color": "tab:blue", "marker": "o"},
    "open_mpi": {"label": "Open MPI, C", "color": "tab:red", "marker": "s"},
}
#: Sec. VI-B1: ms a batch at bound 0 and at larger bounds, 8 nodes.
_PAPER_DELAYS = {"k = 0": 17.0, "k > 0": 12.0}


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
    draw_curves(axis, ((entry["bytes"], entry["us"]) for entry in results), _STYLES)
    axis.set(xscale="log", yscale="log", xlabel="bytes per pair", ylabel="µs a call")
    axis.axvspan(results[0]["bytes"], 4096, alpha=0.08, color="tab:red")
    axis.axvspan(4096, results[-1]["bytes"], alpha=0.08, color="tab:blue")
    axis.text(0.03, 0.6, "paper:\nMPI faster", transform=axis.transAxes, fontsize=7)
    axis.text(0.7, 0.1, "paper:\nBLS faster", transform=axis.transAxes, fontsize=7)


def _draw_repetitions(axis: Any, stage: Stage) -> None:
    calls = ((entry["repetitions"], entry["seconds"]) for entry in stage["results"])
    draw_curves(axis, calls, _STYLES)
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
    draw_by_bound(axis, by_bound(stage, "ms_per_step"), _STYLES, "ms a step")


def _draw_dlrm(axis: Any, stage: Stage) -> None:
    times = by_bound(stage, "step_ms")
    draw_by_bound(axis, times, _STYLES, "ms a batch")
    # The paper's reference line: the original DLRM over the backend of comparison.
    reference = times[0].get("mpi", times[0]["gloo"])["mean"]
    axis.axhline(reference, color="tab:gray", linestyle=":", label="k = 0, reference")
