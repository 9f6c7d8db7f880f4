"""Table and plot of the embedding benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Result = dict[str, Any]


def print_table(results: list[Result]) -> None:
    """Prints medians with quartiles and the ratios of the medians."""
    print(
        f"{'module':6} {'sharding':10} {'ranks':>5} {'batch':>5} {'TorchRec on gloo, ms':>22} "
        f"{'bounded lag, ms':>20} {'lookup, ms':>10} {'speed-up':>8} {'/lookup':>7}"
    )
    for result in results:
        times = result["ms"]
        theirs, ours, lookup = (times[name] for name in ("torchrec", "ours", "lookup"))
        print(
            f"{result['module']:6} {result['sharding']:10} {result['ranks']:5} {result['batch']:5} "
            f"{_cell(theirs):>22} {_cell(ours):>20} {lookup['median']:10.2f} "
            f"{theirs['median'] / ours['median']:8.2f} {ours['median'] / lookup['median']:7.2f}"
        )


def _cell(times: dict[str, float]) -> str:
    return f"{times['median']:.2f} [{times['q1']:.2f}-{times['q3']:.2f}]"


def write_plot(path: Path, results: list[Result]) -> None:
    """Draws the forward times of each case side by side."""
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(results) + 1.5), layout="constrained")
    labels = [
        f"{r['module']} {r['sharding'].replace('_', '-')}, {r['ranks']} ranks, batch {r['batch']}"
        for r in results
    ]
    styles = {
        "torchrec": ("TorchRec on gloo", "tab:gray"),
        "ours": ("bounded lag, bound 0", "tab:blue"),
        "lookup": ("lookup alone", "tab:green"),
    }
    for row, (name, (label, colour)) in enumerate(styles.items()):
        axes.barh(
            [index + 0.27 * (row - 1) for index in range(len(results))],
            [r["ms"][name]["median"] for r in results],
            height=0.25,
            label=label,
            color=colour,
        )
    axes.set_yticks(range(len(results)), labels)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("forward, ms (median of the slowest rank)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
