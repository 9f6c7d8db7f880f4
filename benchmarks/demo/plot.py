"""The demo's plot: the time of a step by the bound, beside TorchRec's and that of direct reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.demo.summary import Line


def write_plot(path: Path, lines: Sequence[Line], subtitle: str) -> None:
    """Draws the table's times of a step into a PNG."""
    bounded = sorted(
        (line for line in lines if line.bound is not None), key=lambda line: line.bound or 0
    )
    positions = range(len(bounded))
    figure, axes = plt.subplots(figsize=(8.6, 4.2), layout="constrained")
    names = {"bounded lag": (bounded[-1].step_ms, "tab:blue")} if bounded else {}
    unbounded = [line for line in lines if line.bound is None]
    for line, color in zip(unbounded, ("tab:gray", "tab:green"), strict=False):
        axes.axhline(line.step_ms, color=color, linestyle=":")
        names[f"{line.name}, {line.step_ms:.1f}"] = (line.step_ms, color)
    ideal = [math.nan if line.ideal_ms is None else line.ideal_ms for line in bounded]
    axes.plot(positions, ideal, color="tab:orange", linestyle="--", marker="s", markersize=4)
    errors = [0.0 if math.isnan(line.step_ci_ms) else line.step_ci_ms for line in bounded]
    axes.errorbar(
        positions,
        [line.step_ms for line in bounded],
        yerr=errors,
        color="tab:blue",
        marker="o",
        capsize=3,
    )
    for position, line, error in zip(positions, bounded, errors, strict=True):
        above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        end = (position, line.step_ms + error)
        axes.annotate(f"{line.step_ms:.1f}", end, color="tab:blue", **above)
    top = 1.2 * max(line.step_ms for line in lines)
    for name, (level, color) in _apart(names, 0.06 * top).items():
        axes.annotate(
            name,
            (1.01, level / top),
            xycoords="axes fraction",
            color=color,
            va="center",
            annotation_clip=False,
        )
    axes.set_xticks(positions, [f"k = {line.bound}" for line in bounded])
    axes.set_xlabel(
        "bound k, steps that ranks may be apart (an answer comes 2k steps later)\n"
        "dashed orange: the same delays and work, if exchanges cost nothing; bars: 95 % intervals"
    )
    axes.set_ylim(0, top)
    axes.set_title(f"DLRM inference under random delays: ms per step\n{subtitle}", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _apart(names: dict[str, tuple[float, str]], least: float) -> dict[str, tuple[float, str]]:
    """Moves names that stand at nearly the same level up, until they can be read."""
    placed: dict[str, tuple[float, str]] = {}
    below = -math.inf
    for name, (level, color) in sorted(names.items(), key=lambda item: item[1][0]):
        below = max(level, below + least)
        placed[name] = (below, color)
    return placed
