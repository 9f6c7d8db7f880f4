"""Draws what a bound does: four ranks that are late now and then, at k = 0 and at k = 2.

`python docs/figures/timelines.py` writes timelines.png beside itself. The times are those of
`ideal_finish_times`: exchanges cost nothing, so that all there is to see is waiting.
"""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from torchrec_bls.observe import ideal_finish_times

RANKS, STEPS, USUAL_MS, LATE_MS = 4, 12, 4.0, 12.0
WORK, LATE, WAITING = "#4878a8", "#e0904a", "#e3e3e3"


def durations() -> np.ndarray:
    """Returns (RANKS, STEPS) milliseconds: each rank is late in one step of four, at random."""
    late = np.random.default_rng(5).random((RANKS, STEPS)) < 0.25
    return np.where(late, LATE_MS, USUAL_MS)


def draw(axes: Axes, work: np.ndarray, bound: int) -> float:
    """Draws the ranks' steps one under the other; returns when the last one ends."""
    finish = ideal_finish_times(work, bound)
    start = np.concatenate([np.zeros((RANKS, 1)), finish[:, :-1]], axis=1)
    for rank in range(RANKS):
        for step in range(STEPS):
            begin, busy = start[rank, step], work[rank, step]
            colour = LATE if busy > USUAL_MS else WORK
            axes.barh(rank, busy, left=begin, color=colour, edgecolor="white", height=0.8)
            axes.text(
                begin + busy / 2, rank, str(step), color="white", ha="center", va="center", size=8
            )
            waited = finish[rank, step] - begin - busy
            axes.barh(rank, waited, left=begin + busy, color=WAITING, height=0.8)
    end = float(finish.max())
    axes.axvline(end, color="black", linewidth=1)
    axes.text(end + 1, RANKS / 2 - 0.5, f"{end:.0f} ms", va="center")
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return end


def main() -> None:
    """Writes the figure."""
    work = durations()
    figure, (synchronous, lagging) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 4.2))
    end = draw(synchronous, work, 0)
    synchronous.set_title("k = 0: every step takes as long as its slowest rank", loc="left")
    draw(lagging, work, 2)
    lagging.set_title(
        "k = 2: a late rank holds up nobody who is less than 2 steps ahead", loc="left"
    )
    lagging.set_xlabel("ms")
    lagging.set_xlim(0, end * 1.08)
    figure.legend(
        handles=[
            Patch(color=WORK, label="step, with its number"),
            Patch(color=LATE, label="step in which the rank is late"),
            Patch(color=WAITING, label="waiting for others"),
        ],
        loc="lower center",
        ncols=3,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
