"""The demo's plot: latency and ideal by the bound, and lines for TorchRec and direct reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from demo.summary import Line


def write_plot(path: Path, lines: Sequence[Line], subtitle: str) -> None:
    """Draws the table's latencies into a PNG."""
    bounded = sorted(
        (line for line in lines if line.bound is not None), key=lambda line: line.bound or 0
    )
    positions = range(len(bounded))
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    unbounded = [line for line in lines if line.bound is None]
    for line, color in zip(unbounded, ("tab:gray", "tab:green"), strict=False):
        axes.axhline(line.latency_ms, color=color, linestyle=":", label=line.name)
    axes.errorbar(
        positions,
        [line.latency_ms for line in bounded],
        yerr=[0.0 if math.isnan(line.latency_ci_ms) else line.latency_ci_ms for line in bounded],
        color="tab:blue",
        marker="o",
        capsize=3,
        label="bounded lag",
    )
    axes.plot(
        positions,
        [math.nan if line.ideal_ms is None else line.ideal_ms for line in bounded],
        color="tab:orange",
        linestyle="--",
        marker="s",
        markersize=4,
        label="ideal: same delays and work, free exchange",
    )
    axes.set_xticks(positions, [str(line.bound) for line in bounded])
    axes.set_xlabel("bound k, steps that ranks may be apart")
    axes.set_ylabel("latency per batch, ms")
    axes.set_ylim(0, 1.15 * max(line.latency_ms for line in lines))
    axes.set_title(f"DLRM inference under random delays\n{subtitle}", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
