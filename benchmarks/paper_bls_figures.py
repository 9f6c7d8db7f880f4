"""Figures of the record of paper_bls, with what the paper says beside the measurements.

The paper's curves are not at hand as numbers: what is drawn of it are the figures in its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from common import mean_interval

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

Series = dict[str, list[tuple[float, list[float]]]]


def draw(folder: Path, stages: dict[str, Any]) -> None:
    """Writes bls-fig6.png, bls-fig7.png and bls-fig8.png for the stages that are there."""
    _figure(folder / "bls-fig6.png", stages, {"fig6a": _draw_sizes, "fig6b": _draw_repetitions})
    _figure(
        folder / "bls-fig7.png",
        stages,
        {
            "fig7-delays": _draw_delays,
            "fig7-dlrm-delays": _draw_dlrm,
            "fig7-sizes": _draw_windows,
            "fig7-dlrm-ids": _draw_dlrm,
        },
    )
    _figure(folder / "bls-fig8.png", stages, {"fig8": _draw_dlrm})


def _figure(path: Path, stages: dict[str, Any], panels: dict[str, Callable[..., None]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {
        name: panels[name.rpartition("-")[0]]
        for name in stages
        if name.rpartition("-")[0] in panels
    }
    if not names:
        return
    ranks = sorted({int(name.rpartition("-")[2]) for name in names})
    figures = [figure for figure in panels if any(n.startswith(f"{figure}-") for n in names)]
    figure, axes = pyplot.subplots(
        len(ranks), len(figures), figsize=(4.6 * len(figures), 3.6 * len(ranks)), squeeze=False
    )
    for row, count in zip(axes, ranks, strict=True):
        for axis, kind in zip(row, figures, strict=True):
            if (name := f"{kind}-{count}") in stages:
                panels[kind](axis, stages[name])
                axis.set_title(f"{kind}, {count} ranks", fontsize=9)
                axis.grid(alpha=0.3)
                axis.legend(fontsize=7)
            else:
                axis.set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_sizes(axis: Any, stage: Any) -> None:
    results = stage["results"]
    _curves(axis, _by_peer((e["bytes"], e["us"]) for e in results))
    axis.set(xscale="log", yscale="log", xlabel="bytes per pair", ylabel="µs a call")
    axis.axvspan(results[0]["bytes"], 4096, alpha=0.08, color="tab:red")
    axis.axvspan(4096, results[-1]["bytes"], alpha=0.08, color="tab:blue")
    axis.text(0.03, 0.6, "paper:\nMPI faster", transform=axis.transAxes, fontsize=7)
    axis.text(0.7, 0.1, "paper:\nBLS faster", transform=axis.transAxes, fontsize=7)


def _draw_repetitions(axis: Any, stage: Any) -> None:
    _curves(axis, _by_peer((e["repetitions"], e["seconds"]) for e in stage["results"]))
    axis.set(xscale="log", yscale="log", xlabel="calls of 32 KiB per pair", ylabel="seconds")
    note = "paper: BLS faster for 1 call,\n2-3 x slower than MPI for more"
    axis.text(0.4, 0.05, note, transform=axis.transAxes, fontsize=7)


def _draw_delays(axis: Any, stage: Any) -> None:
    _draw_windows(axis, stage)
    ideals = {entry["bound"]: entry["computed_ideal_ms"] for entry in stage["results"]}
    axis.plot(range(len(ideals)), list(ideals.values()), "k:", label="ideal, computed")
    for value, label in zip(_PAPER_DELAYS, ("k = 0", "k > 0"), strict=True):
        axis.axhline(value, color="tab:gray", linewidth=0.8)
        axis.text(2, value, f"paper, {label}", fontsize=7, va="bottom")
    axis.set_ylim(0, max(axis.get_ylim()[1], 1.1 * max(_PAPER_DELAYS)))


def _draw_windows(axis: Any, stage: Any) -> None:
    bounds = stage["settings"]["bounds"]
    series: Series = {}
    for entry in stage["results"]:
        point = (bounds.index(entry["bound"]), entry["ms_per_step"])
        series.setdefault(entry["peer"], []).append(point)
    _curves(axis, series)
    _bound_axis(axis, bounds, "ms a step")


def _draw_dlrm(axis: Any, stage: Any) -> None:
    bounds = stage["settings"]["bounds"]
    series: Series = {}
    for entry in stage["results"]:
        point = (bounds.index(entry["bound"]), [fmean(run) for run in entry["step_ms"]])
        series.setdefault(entry["backend"], []).append(point)
    _curves(axis, series)
    # The paper's reference line: the original DLRM over the backend of comparison.
    reference = series.get("mpi", series["gloo"])[0][1]
    axis.axhline(fmean(reference), color="tab:gray", linestyle=":", label="k = 0, reference")
    _bound_axis(axis, bounds, "ms a batch")


def _by_peer(entries: Iterable[tuple[float, dict[str, list[float]]]]) -> Series:
    series: Series = {}
    for position, peers in entries:
        for peer, runs in peers.items():
            series.setdefault(peer, []).append((position, runs))
    return series


def _curves(axis: Any, series: Series) -> None:
    for name, points in series.items():
        label, colour, marker = _STYLES[name]
        found = [(position, mean_interval(runs)) for position, runs in points]
        axis.errorbar(
            [position for position, _ in found],
            [value["mean"] for _, value in found],
            yerr=[value["ci95"] for _, value in found],
            label=label,
            color=colour,
            marker=marker,
            markersize=4,
            capsize=2,
            linewidth=1,
        )


def _bound_axis(axis: Any, bounds: list[int], label: str) -> None:
    axis.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
    axis.set(xlabel="bound k", ylabel=label)
    axis.set_ylim(bottom=0)
